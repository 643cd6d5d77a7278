//! Metrics of annotation patches and Events.

use inpod_service::metrics::{ObservableGauge, duration_histogram};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::counters::Metric;

pub(crate) const LAG: Metric = Metric {
    name: "annotation_lag",
    labels: "",
    help: "Time from a change of a pod's desired annotation until the API server accepts it",
};

pub(crate) const PATCHES: Metric = Metric {
    name: "annotation_patches",
    labels: "result",
    help: "Patches of the annotation ambient.istio.io/redirection, by result",
};

pub(crate) const EVENTS: Metric = Metric {
    name: "events",
    labels: "result",
    help: "Events about pods and the node, by result; dropped means that a rate limit was reached",
};

pub(crate) const UNMET: Metric = Metric {
    name: "annotations_unmet",
    labels: "",
    help: "Pods whose annotation ambient.istio.io/redirection is not in sync yet",
};

type ByResult = [(&'static str, &'static str); 1];

#[derive(Clone, Debug)]
pub(crate) struct StatusMetrics {
    pub(crate) lag: Histogram,
    patches: Family<ByResult, Counter>,
    events: Family<ByResult, Counter>,
}

impl Default for StatusMetrics {
    fn default() -> Self {
        Self {
            lag: duration_histogram(),
            patches: Family::default(),
            events: Family::default(),
        }
    }
}

impl StatusMetrics {
    pub(crate) fn register(
        &self,
        registry: &mut Registry,
        unmet: impl Fn() -> u64 + Send + Sync + 'static,
    ) {
        registry.register_with_unit(LAG.name, LAG.help, Unit::Seconds, self.lag.clone());
        registry.register(PATCHES.name, PATCHES.help, self.patches.clone());
        registry.register(EVENTS.name, EVENTS.help, self.events.clone());
        registry.register_collector(ObservableGauge::new(UNMET.name, UNMET.help, unmet));
    }

    pub(crate) fn count_patch(&self, result: &'static str) {
        self.patches.get_or_create(&[("result", result)]).inc();
    }

    pub(crate) fn count_event(&self, result: &'static str) {
        self.events.get_or_create(&[("result", result)]).inc();
    }
}
