use std::{sync::Arc, time::Duration};

use inpod_service::metrics::{ObservableGauge, duration_histogram};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use tonic::Status;

use inpod_linux::Netns;

use crate::{claims::Claims, conntrack, inspect, netlink, probes::ProbeSet};

type ByOperationAndResult = [(&'static str, &'static str); 2];

#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    operations: Family<ByOperationAndResult, Histogram, fn() -> Histogram>,
    differences: Counter,
}

impl Metrics {
    pub(crate) fn register(
        registry: &mut Registry,
        claims: &Arc<Claims>,
        probe_set: &Arc<ProbeSet>,
    ) -> Self {
        let metrics = Self {
            operations: Family::new_with_constructor(duration_histogram),
            differences: Counter::default(),
        };
        let help = "Time to apply, plan, verify, drain or remove the rules of a netns, once its lock is held; the result is OK or a reason";
        let operations = metrics.operations.clone();
        registry.register_with_unit("rules_duration", help, Unit::Seconds, operations);
        let help = "Verifications that found rules out of sync";
        registry.register("rules_differing", help, metrics.differences.clone());
        let claims = Arc::clone(claims);
        let held = move || u64::try_from(claims.count()).unwrap_or(u64::MAX);
        let help = "Network namespaces held for sandboxes";
        registry.register_collector(ObservableGauge::new("claims", help, held));
        register_costs(registry);
        register_probes(registry, probe_set);
        metrics
    }

    pub(crate) fn record<T>(
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

    pub(crate) fn record_difference(&self) {
        self.differences.inc();
    }
}

/// Registers counts of operations that make a call expensive on any machine;
/// `integration/tests/scenarios/alone/limits.rs` limits the counts per ADD and DEL.
fn register_costs(registry: &mut Registry) {
    let mut register = |name, help, read: fn() -> u64| {
        registry.register_collector(ObservableGauge::new(name, help, read));
    };
    let help = "Scans of the node's processes, to find a netns or the processes in one";
    register("process_walks", help, inspect::proc_scans);
    let help = "Dumps of the node's connection tracking table";
    register("conntrack_dumps", help, conntrack::dumps);
    let help = "Requests to the kernel by netlink; a transaction is one";
    register("netlink_requests", help, netlink::requests);
    let help = "Times that a thread entered another netns (setns)";
    register("netns_visits", help, Netns::visits);
}

fn register_probes(registry: &mut Registry, probe_set: &Arc<ProbeSet>) {
    let help = "Repairs of the node's probe set after another process changed it";
    registry.register("probe_restores", help, probe_set.restores().clone());
    let help = "Addresses in the node's probe set";
    registry.register("probe_elements", help, probe_set.elements().clone());
}
