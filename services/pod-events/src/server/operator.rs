//! RPCs for operators: `ExplainPod`, `ListPods` and `Resync`.

use futures_util::future::OptionFuture;
use inpod_proto::{Invalid, podevents::v1 as wire, types::v1 as types};
use inpod_types::{Failure, PodUid, Reason};
use tokio::time::Instant;

use super::{QUERY_TIMEOUT, Server, selection::Selection};
use crate::{
    checkpoint::{Intent, Record},
    explain::{self, PodInfo, ServiceReports},
    pod::PodKey,
};

impl Server {
    fn pod_unknown(&self, name: &str) -> Failure {
        let gap = self.shared.source.inventory().describe_gap();
        let message = format!("pod {name} is not known{gap}");
        Failure::new(Reason::PodUnknown, message)
    }

    pub(super) fn pod_info(&self, key: &PodKey) -> Option<PodInfo> {
        explain::pod_info(&self.shared, &self.registry, key)
    }

    pub(super) fn find(&self, selector: Option<types::PodSelector>) -> Result<PodInfo, Failure> {
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
        let name = format!("{}/{}", key.0, key.1);
        let known = self.pod_info(&key).ok_or_else(|| self.pod_unknown(&name))?;
        if selection.matches(&known) {
            return Ok(known);
        }
        let message = format!("{name} has the UID {}", known.pod.uid);
        Err(Failure::new(Reason::PodUidMismatch, message).at_field("pod.uid"))
    }

    fn find_by_uid(&self, uid: &PodUid) -> Result<PodInfo, Failure> {
        let all = self.keys(&Selection::default()).into_iter();
        let matching = all.filter_map(|key| self.pod_info(&key));
        let mut matching: Vec<_> = matching.filter(|known| known.has_uid(uid)).collect();
        // A UID takes precedence over the hash of a static pod.
        let by_uid = matching.iter().position(|known| known.pod.uid == *uid);
        let found =
            (!matching.is_empty()).then(|| matching.swap_remove(by_uid.unwrap_or_default()));
        found.ok_or_else(|| self.pod_unknown(&format!("with UID {uid}")))
    }

    pub(super) fn summaries(
        &self,
        selection: &Selection,
    ) -> impl Iterator<Item = wire::PodSummary> {
        let keys = self.keys(selection).into_iter();
        let known = keys.filter_map(|key| self.pod_info(&key));
        known
            .filter(|known| selection.matches(known))
            .map(|known| explain::summary(&known))
    }

    /// Resyncs the selected pods and returns their new state. Pods that are not enrolled have nothing to verify, but
    /// are returned, too.
    pub(super) async fn resync_selected(
        &self,
        selection: &Selection,
    ) -> Result<Vec<wire::PodSummary>, Failure> {
        let mut keys = self.keys(selection);
        keys.retain(|key| {
            self.pod_info(key)
                .is_some_and(|known| selection.matches(&known))
        });
        if keys.is_empty() && selection.names_pod() {
            return Err(self.pod_unknown("that is so named"));
        }
        self.registry.resync(&keys).await;
        tracing::info!(pods = keys.len(), "Resynced pods");
        let resynced = keys.iter().filter_map(|key| self.pod_info(key));
        Ok(resynced.map(|known| explain::summary(&known)).collect())
    }

    /// Explains a pod. The explanation lists the missing answers of other services as unavailable.
    pub(super) async fn explain(&self, known: &PodInfo) -> wire::ExplainPodResponse {
        let reports = match known.current() {
            Some(record) if !matches!(record.intent, Intent::Out) => self.inspect(record).await,
            Some(_) | None => ServiceReports::default(),
        };
        let synced = self.shared.pipeline.synced.borrow().clone();
        explain::response(known, &self.shared.policy(), &synced, reports)
    }

    async fn inspect(&self, record: &Record) -> ServiceReports {
        let deadline = Instant::now() + QUERY_TIMEOUT;
        if record.is_detached() {
            return ServiceReports::default();
        }
        let has_own_rules = !record.is_legacy();
        if record.netns_id.is_none() {
            // netconfig has no claim to inspect.
            let workloads = self.clients().list_workloads(deadline).await;
            return ServiceReports {
                workloads: Some(workloads),
                ..ServiceReports::default()
            };
        }
        // ztunnel does not know pods with a sidecar.
        let workloads = async {
            let is_ambient = !record.redirection.is_sidecar();
            let query = || self.clients().list_workloads(deadline);
            OptionFuture::from(is_ambient.then(query)).await
        };
        let (plan, netns, workloads) = tokio::join!(
            OptionFuture::from(has_own_rules.then(|| self.clients().plan_rules(record, deadline))),
            self.clients().inspect(&record.sandbox, deadline),
            workloads,
        );
        ServiceReports {
            plan,
            netns: Some(netns),
            workloads,
        }
    }
}
