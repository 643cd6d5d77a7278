//! RPCs for operators: `ExplainPod`, `ListPods` and `Resync`.

use std::collections::BTreeSet;

use futures_util::future::OptionFuture;
use inpod_proto::{
    Invalid, netconfig::v1::inspect_netns_request::Target, podevents::v1 as wire,
    types::v1 as types,
};
use inpod_types::{Failure, Reason};
use tokio::time::Instant;

use super::{QUERY_TIMEOUT, Server, keys, selection::Selection};
use crate::{
    checkpoint::Record,
    clients::InspectionScope,
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

    /// Returns the selected pods among all shown or recorded pods.
    pub(super) fn pods(&self, selection: &Selection) -> impl Iterator<Item = PodInfo> {
        let keys = keys(&self.shared, &self.registry, selection).into_iter();
        let known = keys.filter_map(|key| self.pod_info(&key));
        known.filter(|known| selection.matches(known))
    }

    pub(super) fn find(&self, selector: Option<types::PodSelector>) -> Result<PodInfo, Failure> {
        let selector = selector.ok_or_else(|| Invalid::new("pod", "pod is required"))?;
        let selection = Selection::parse(Some(selector))?;
        let (namespace, name) = match (&selection.namespace, &selection.name, &selection.uid) {
            (Some(namespace), Some(name), _) => (namespace, name),
            (None, None, Some(uid)) => {
                // A UID takes precedence over the hash of a static pod.
                let found = self
                    .pods(&selection)
                    .min_by_key(|known| known.pod.uid != *uid);
                return found.ok_or_else(|| self.pod_unknown(&format!("with UID {uid}")));
            }
            (None, _, _) => {
                return Err(Invalid::new("pod.namespace", "namespace is required").into());
            }
            (Some(_), None, _) => return Err(Invalid::new("pod.name", "name is required").into()),
        };
        let known = self.pod_info(&(namespace.clone(), name.clone()));
        let name = format!("{namespace}/{name}");
        let known = known.ok_or_else(|| self.pod_unknown(&name))?;
        if selection.matches(&known) {
            return Ok(known);
        }
        let message = format!("{name} has the UID {}", known.pod.uid);
        Err(Failure::new(Reason::PodUidMismatch, message).at_field("pod.uid"))
    }

    /// Resyncs the selected pods and returns their new state. Pods that are not enrolled have nothing to verify, but
    /// are returned, too.
    pub(super) async fn resync_selected(
        &self,
        selection: &Selection,
    ) -> Result<Vec<wire::PodSummary>, Failure> {
        let keys: BTreeSet<PodKey> = self.pods(selection).map(|known| known.key).collect();
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
            Some(record) if record.intent.has_effects() => self.inspect(record).await,
            Some(_) | None => ServiceReports::default(),
        };
        let synced = self.shared.synced();
        explain::response(known, &self.shared.policy(), &synced, reports)
    }

    async fn inspect(&self, record: &Record) -> ServiceReports {
        if record.is_detached() {
            return ServiceReports::default();
        }
        let (clients, deadline) = (self.clients(), Instant::now() + QUERY_TIMEOUT);
        // Without a netns, netconfig has no claim to inspect.
        let is_claimed = record.netns_id.is_some();
        let has_own_rules = is_claimed && !record.is_legacy();
        // ztunnel does not know pods with a sidecar.
        let has_ztunnel = !is_claimed || !record.redirection.is_sidecar();
        let target = Target::Sandbox((&record.sandbox).into());
        let inspect = || clients.inspect(target, InspectionScope::All, deadline);
        let (plan, netns, workloads) = tokio::join!(
            OptionFuture::from(has_own_rules.then(|| clients.plan_rules(record, deadline))),
            OptionFuture::from(is_claimed.then(inspect)),
            OptionFuture::from(has_ztunnel.then(|| clients.list_workloads(deadline))),
        );
        ServiceReports {
            plan,
            netns,
            workloads,
        }
    }
}
