//! What netconfig counts.

use std::{sync::Arc, time::Duration};

use daemon::metrics::{Watched, durations};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use tonic::Status;

use crate::claims::Claims;

type ByOperationAndResult = [(&'static str, &'static str); 2];

/// What was done in claimed netns.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    operations: Family<ByOperationAndResult, Histogram, fn() -> Histogram>,
    differing: Counter,
}

impl Metrics {
    /// Declares netconfig's metrics.
    pub(crate) fn register(registry: &mut Registry, claims: &Arc<Claims>) -> Self {
        let metrics = Self {
            operations: Family::new_with_constructor(durations),
            differing: Counter::default(),
        };
        let help = "Work on the rules of a netns without the wait for its turn; the result is OK or a reason";
        let operations = metrics.operations.clone();
        registry.register_with_unit("rules_duration", help, Unit::Seconds, operations);
        let help = "Verifications that found other rules than there should be";
        registry.register("rules_differing", help, metrics.differing.clone());
        let claims = Arc::clone(claims);
        let held = move || u64::try_from(claims.count()).unwrap_or(u64::MAX);
        let help = "Network namespaces held for sandboxes";
        registry.register_collector(Watched::one("claims", help, held));
        metrics
    }

    /// Something was done to the rules of a netns, or could not be.
    pub(crate) fn done<T>(
        &self,
        operation: &'static str,
        result: &Result<T, Status>,
        took: Duration,
    ) {
        let result = match result {
            Ok(_) => "OK",
            Err(status) => inpod_proto::failure_of(status).reason.name(),
        };
        let labels = [("operation", operation), ("result", result)];
        let operations = self.operations.get_or_create(&labels);
        operations.observe(took.as_secs_f64());
    }

    /// A verification found something.
    pub(crate) fn differs(&self) {
        self.differing.inc();
    }
}
