//! Counters that the parts of the service maintain. `metrics` collects the counters.

mod phases;

use inpod_types::Reason;
use prometheus_client::metrics::{counter::Counter, family::Family};

pub use phases::{Phase, PhaseGuard, Phases};

#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name without the prefix, the unit and the `_total` of counters.
    pub name: &'static str,
    /// The label names, comma-separated; empty if there are no labels.
    pub labels: &'static str,
    pub help: &'static str,
}

type ByReason = [(&'static str, &'static str); 1];

#[derive(Clone, Debug, Default)]
pub struct Counters {
    pub(crate) retries: Family<ByReason, Counter>,
}

impl Counters {
    pub(crate) fn retry(&self, reason: Reason) {
        let labels = [("reason", reason.name())];
        self.retries.get_or_create(&labels).inc();
    }
}
