//! Metrics under the names of Istio's node agent, as far as inpod has the same events.

use std::{hash::Hash, sync::Arc};

use inpod_types::{Enrollment, Reason};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::sync::watch;

use crate::counters::Metric;
use crate::inventory::{Inventory, SharedMap};

/// Istio's plugin calls its agent only for pods in the mesh (services/docs/facts/istio-ambient.md, 3).
pub(super) const REQUESTS: Metric = Metric {
    name: "istio_cni_plugin_requests",
    labels: "response_code",
    help: "ADDs of pods in the mesh and all failed ADDs, by response code: 200 for success, 400 for an invalid request, 500 for any other failure",
};

/// Events of pods and namespaces (services/docs/facts/istio-ambient.md, 4.1).
pub(super) const EVENTS: Metric = Metric {
    name: "nodeagent_reconcile_events",
    labels: "type",
    help: "Pods and namespaces added, updated or deleted in this node's view; simultaneous changes of one object count once",
};

type ByCode = [(&'static str, &'static str); 1];

#[derive(Clone, Debug)]
pub struct IstioMetrics {
    requests: Family<ByCode, Counter>,
    events: Family<ByCode, Counter>,
}

impl IstioMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            events: Family::default(),
        };
        registry.register(REQUESTS.name, REQUESTS.help, metrics.requests.clone());
        registry.register(EVENTS.name, EVENTS.help, metrics.events.clone());
        metrics
    }

    pub(crate) fn count_add(&self, added: Result<Enrollment, Reason>) {
        if let Some(code) = response_code(added) {
            let labels = [("response_code", code)];
            self.requests.get_or_create(&labels).inc();
        }
    }

    /// Counts changes of the inventory. Everything present at the start counts as added.
    pub(crate) async fn count_changes(self, mut changes: watch::Receiver<Arc<Inventory>>) {
        let mut before = Arc::default();
        loop {
            let now = Arc::clone(&changes.borrow_and_update());
            self.count(&before, &now);
            before = now;
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn count(&self, before: &Inventory, now: &Inventory) {
        let pods = count_differences(&before.pods, &now.pods);
        let namespaces = count_differences(&before.namespaces, &now.namespaces);
        for (kind, counts) in [("pods", pods), ("namespaces", namespaces)] {
            tracing::trace!(kind, ?counts, "The view changed");
            for (what, count) in ["add", "update", "delete"].into_iter().zip(counts) {
                self.events.get_or_create(&[("type", what)]).inc_by(count);
            }
        }
    }
}

fn response_code(added: Result<Enrollment, Reason>) -> Option<&'static str> {
    match added {
        Ok(Enrollment::Ambient) => Some("200"),
        Ok(Enrollment::None | Enrollment::Sidecar | Enrollment::Unknown) => None,
        Err(Reason::InvalidField) => Some("400"),
        Err(_) => Some("500"),
    }
}

fn count_differences<K, V>(before: &SharedMap<K, V>, now: &SharedMap<K, V>) -> [u64; 3]
where
    K: Hash + Ord + Clone,
    V: Clone + PartialEq,
{
    let mut counts = [0, 0, 0];
    let [added, updated, deleted] = &mut counts;
    for key in now.differences(before) {
        match (before.contains_key(&key), now.contains_key(&key)) {
            (false, _) => *added += 1,
            (true, true) => *updated += 1,
            (true, false) => *deleted += 1,
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_adds_of_the_mesh_count_as_requests() {
        let codes = [
            Ok(Enrollment::Ambient),
            Ok(Enrollment::None),
            Err(Reason::InvalidField),
            Err(Reason::Overloaded),
        ]
        .map(response_code);
        assert_eq!(codes, [Some("200"), None, Some("400"), Some("500")]);
    }

    #[test]
    fn each_pod_that_differs_counts_once() {
        let map = |entries: &[(&'static str, u32)]| {
            let mut map = SharedMap::default();
            for (key, value) in entries {
                map.insert(*key, *value);
            }
            map
        };
        let before = map(&[("a", 1), ("b", 1), ("c", 1)]);
        let now = map(&[("b", 2), ("c", 1), ("d", 1), ("e", 1)]);
        assert_eq!(count_differences(&before, &now), [2, 1, 1]);
    }
}
