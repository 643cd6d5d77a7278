//! What this service counts.

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// What was tried with a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// It was to be redirected in place.
    Repair,
    /// It was to be labelled.
    Label,
    /// It was to be deleted.
    Delete,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It is so.
    Success,
    /// It was not to be done after all.
    Skip,
    /// It is not so.
    Fail,
}

type ByActionAndResult = [(&'static str, &'static str); 2];

/// Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pods: Family<ByActionAndResult, Counter>,
    unhealthy: Gauge,
    events: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Metrics {
    /// Declares them.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Pods without the redirection that they should have, by action (repair: in place, by pod-events; label; delete) and result (success, skip, fail)";
        registry.register("pods", help, metrics.pods.clone());
        let help = "Pods of this node that lack the redirection that they should have";
        registry.register("pods_amiss", help, metrics.unhealthy.clone());
        let help = "Events about pods, by result: sent, failed, dropped";
        registry.register("events", help, metrics.events.clone());
        metrics
    }

    /// Something came of a way.
    pub(crate) fn count(&self, action: Action, outcome: Outcome) {
        let action = match action {
            Action::Repair => "repair",
            Action::Label => "label",
            Action::Delete => "delete",
        };
        let outcome = match outcome {
            Outcome::Success => "success",
            Outcome::Skip => "skip",
            Outcome::Fail => "fail",
        };
        let labels = [("type", action), ("result", outcome)];
        self.pods.get_or_create(&labels).inc();
    }

    /// So many pods lack something.
    pub(crate) fn unhealthy(&self, pods: usize) {
        self.unhealthy.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    /// Something became of an Event.
    pub(crate) fn event(&self, result: &'static str) {
        self.events.get_or_create(&[("result", result)]).inc();
    }
}
