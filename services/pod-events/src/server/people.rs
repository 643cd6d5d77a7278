//! What people ask.

use futures_util::future::OptionFuture;
use inpod_proto::{Invalid, podevents::v1 as wire, types::v1 as types};
use inpod_types::{Failure, PodUid, Reason};
use tokio::time::Instant;

use super::{LOOK, Server, selection::Selection};
use crate::{
    checkpoint::{Intent, Record},
    explain::{self, Known, Seen},
    source::PodKey,
};

fn unknown(whom: &str) -> Failure {
    Failure::new(Reason::PodUnknown, format!("no pod {whom} is known"))
}

impl Server {
    pub(super) fn known(&self, key: &PodKey) -> Option<Known> {
        explain::known(&self.shared, &self.registry, key)
    }

    /// The one pod that is named, or given by its UID alone.
    pub(super) fn find(&self, selector: Option<types::PodSelector>) -> Result<Known, Failure> {
        if selector.is_none() {
            return Err(Invalid::new("pod", "pod is required").into());
        }
        let selection = Selection::parse(selector)?;
        let Some(key) = selection.key() else {
            return match (&selection.namespace, &selection.name, &selection.uid) {
                (None, None, Some(uid)) => self.find_by_uid(uid),
                (None, _, _) => Err(Invalid::new("pod.namespace", "namespace is required").into()),
                (Some(_), _, _) => Err(Invalid::new("pod.name", "name is required").into()),
            };
        };
        let whom = format!("{}/{}", key.0, key.1);
        let known = self.known(&key).ok_or_else(|| unknown(&whom))?;
        if selection.is_of(&known) {
            return Ok(known);
        }
        let message = format!("{whom} has the UID {}", known.pod.uid);
        Err(Failure::new(Reason::PodUidMismatch, message).at_field("pod.uid"))
    }

    fn find_by_uid(&self, uid: &PodUid) -> Result<Known, Failure> {
        let all = self.keys(&Selection::default()).into_iter();
        let called = all.filter_map(|key| self.known(&key));
        let mut called: Vec<_> = called.filter(|known| known.is_called(uid)).collect();
        // A UID counts before what a pod says of its kubelet's name for it.
        let own = called.iter().position(|known| known.pod.uid == *uid);
        let found = (!called.is_empty()).then(|| called.swap_remove(own.unwrap_or_default()));
        found.ok_or_else(|| unknown(&format!("of UID {uid}")))
    }

    /// A line for each pod that is selected, in the order of their names.
    pub(super) fn summaries(
        &self,
        selection: &Selection,
    ) -> impl Iterator<Item = wire::PodSummary> {
        let keys = self.keys(selection).into_iter();
        let known = keys.filter_map(|key| self.known(&key));
        known
            .filter(|known| selection.is_of(known))
            .map(|known| explain::summary(&known))
    }

    /// Has the pods that are selected looked at. Of whom nothing is in place nothing can be verified; they are told.
    pub(super) async fn look_anew(
        &self,
        selection: &Selection,
    ) -> Result<Vec<wire::PodSummary>, Failure> {
        let mut keys = self.keys(selection);
        keys.retain(|key| self.known(key).is_some_and(|known| selection.is_of(&known)));
        if keys.is_empty() && selection.is_particular() {
            return Err(unknown("that is so named"));
        }
        self.registry.resync(&keys).await;
        tracing::info!(pods = keys.len(), "Looked at pods anew");
        let stand = keys.iter().filter_map(|key| self.known(key));
        Ok(stand.map(|known| explain::summary(&known)).collect())
    }

    /// Everything that is known of a pod. What another service does not tell is left out, and said to be.
    pub(super) async fn explain(&self, known: &Known) -> wire::ExplainPodResponse {
        let seen = match known.current() {
            Some(record) if !matches!(record.intent, Intent::Out) => self.see(record).await,
            Some(_) | None => Seen::default(),
        };
        explain::answer(known, seen)
    }

    async fn see(&self, record: &Record) -> Seen {
        let deadline = Instant::now() + LOOK;
        if record.is_detached() {
            return Seen::default();
        }
        if record.netns_id.is_none() {
            // Nothing is claimed that netconfig could look into.
            let workloads = self.clients().list_workloads(deadline).await;
            return Seen {
                workloads: Some(workloads),
                ..Seen::default()
            };
        }
        // A pod with a sidecar is nothing to ztunnel.
        let workloads = async {
            let asks = !record.redirection.is_sidecar();
            let answer = || self.clients().list_workloads(deadline);
            OptionFuture::from(asks.then(answer)).await
        };
        let (plan, netns, workloads) = tokio::join!(
            self.clients().plan_rules(record, deadline),
            self.clients().inspect(&record.sandbox, deadline),
            workloads,
        );
        Seen {
            plan: Some(plan),
            netns: Some(netns),
            workloads,
        }
    }
}
