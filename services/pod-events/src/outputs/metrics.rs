//! What is counted of what Kubernetes is told.

use std::time::Duration;

use inpod_service::metrics::{Watched, durations};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::metrics::Metric;

/// How late the annotation is.
pub(crate) const LAG: Metric = Metric {
    name: "annotation_lag",
    labels: "",
    help: "From when a pod's annotation was to change to when the API server accepted it",
};

/// What became of patches.
pub(crate) const PATCHES: Metric = Metric {
    name: "annotation_patches",
    labels: "result",
    help: "Patches of the annotation ambient.istio.io/redirection, by what came of them",
};

/// What became of Events.
pub(crate) const EVENTS: Metric = Metric {
    name: "events",
    labels: "result",
    help: "Events about pods, by what came of them; dropped is one that was too many",
};

/// Which annotations are late.
pub(crate) const UNMET: Metric = Metric {
    name: "annotations_unmet",
    labels: "",
    help: "Pods whose annotation ambient.istio.io/redirection is not yet what it should be",
};

type ByResult = [(&'static str, &'static str); 1];

/// What became of patches and Events. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    lag: Histogram,
    patches: Family<ByResult, Counter>,
    events: Family<ByResult, Counter>,
}

impl Default for Counted {
    fn default() -> Self {
        Self {
            lag: durations(),
            patches: Family::default(),
            events: Family::default(),
        }
    }
}

impl Counted {
    pub(super) fn register(
        &self,
        registry: &mut Registry,
        unmet: impl Fn() -> u64 + Send + Sync + 'static,
    ) {
        registry.register_with_unit(LAG.name, LAG.help, Unit::Seconds, self.lag.clone());
        registry.register(PATCHES.name, PATCHES.help, self.patches.clone());
        registry.register(EVENTS.name, EVENTS.help, self.events.clone());
        registry.register_collector(Watched::one(UNMET.name, UNMET.help, unmet));
    }

    /// A wish was met.
    pub(super) fn met_after(&self, lag: Duration) {
        self.lag.observe(lag.as_secs_f64());
    }

    /// A patch was answered.
    pub(super) fn patch(&self, result: &'static str) {
        self.patches.get_or_create(&[("result", result)]).inc();
    }

    /// An Event was sent or not.
    pub(super) fn event(&self, result: &'static str) {
        self.events.get_or_create(&[("result", result)]).inc();
    }
}
