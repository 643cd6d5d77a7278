//! What the parts of the service count themselves. `metrics` collects it.

mod phases;

use inpod_types::Reason;
use prometheus_client::metrics::{counter::Counter, family::Family};

pub use phases::{Phase, PhaseGuard, Phases};

#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Without the prefix, the unit and the `_total` of counters.
    pub name: &'static str,
    /// Comma-separated; empty if there are none.
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
