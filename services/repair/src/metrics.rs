//! The metrics that this service exports.

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// The repair in place, which pod-events performs.
    Repair,
    Label,
    Delete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Success,
    /// The action turned out to be unnecessary.
    Skip,
    Fail,
}

type ByActionAndResult = [(&'static str, &'static str); 2];

#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pods: Family<ByActionAndResult, Counter>,
    unhealthy: Gauge,
    events: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Metrics {
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

    pub(crate) fn unhealthy(&self, pods: usize) {
        self.unhealthy.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    pub(crate) fn event(&self, result: &'static str) {
        self.events.get_or_create(&[("result", result)]).inc();
    }
}
