//! What is counted of what Kubernetes is told.

use std::time::Duration;

use daemon::metrics::{Watched, durations};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
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
        let help = "From when a pod's annotation was to change to when the API server accepted it";
        registry.register_with_unit("annotation_lag", help, Unit::Seconds, self.lag.clone());
        let help = "Patches of the annotation ambient.istio.io/redirection, by what came of them";
        registry.register("annotation_patches", help, self.patches.clone());
        let help = "Events about pods, by what came of them; dropped is one that was too many";
        registry.register("events", help, self.events.clone());
        let help =
            "Pods whose annotation ambient.istio.io/redirection is not yet what it should be";
        registry.register_collector(Watched::one("annotations_unmet", help, unmet));
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
