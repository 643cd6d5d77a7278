//! Metrics of the broker.

use std::{sync::Arc, time::Duration};

use inpod_proto::ztunnelbroker::v1::{SessionPhase, WorkloadPhase};
use inpod_service::metrics::{ObservableGauge, duration_histogram};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{
    hub::{self, Hub},
    nack::Nack,
    session::Session,
};

type ByVerbAndResult = [(&'static str, &'static str); 2];
type ByKind = [(&'static str, String); 1];

#[derive(Clone, Debug)]
pub struct Metrics {
    answers: Family<ByVerbAndResult, Counter>,
    refusals: Family<ByKind, Counter>,
    waits: Histogram,
    refused: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            answers: Family::default(),
            refusals: Family::default(),
            waits: duration_histogram(),
            refused: Counter::default(),
        }
    }
}

impl Metrics {
    pub(crate) fn refused(&self) {
        self.refused.inc();
    }

    pub(crate) fn answered(&self, verb: &'static str, nack: Option<&Nack>, wait: Duration) {
        let result = if nack.is_none() { "ack" } else { "nack" };
        let labels = [("verb", verb), ("result", result)];
        self.answers.get_or_create(&labels).inc();
        self.waits.observe(wait.as_secs_f64());
        if let Some(nack) = nack {
            let kind = nack.kind.as_str_name().trim_start_matches("REFUSAL_");
            let kind = kind.to_lowercase().replace('_', "-");
            self.refusals.get_or_create(&[("kind", kind)]).inc();
        }
    }
}

pub(crate) fn register(registry: &mut Registry, hub: &Arc<Hub>) {
    let metrics = hub.metrics().clone();
    let help = "Connections to the ZDS socket that were refused";
    registry.register("refused_ztunnels", help, metrics.refused);
    let help = "Messages that ztunnels answered, by verb and result";
    registry.register("answers", help, metrics.answers);
    let help = "Negative acknowledgements from ztunnels, by kind";
    registry.register("refusals", help, metrics.refusals);
    let help = "Time from a message to ztunnel until its answer";
    registry.register_with_unit("answer_wait", help, Unit::Seconds, metrics.waits);
    for (name, help, read) in GAUGES {
        let hub = Arc::clone(hub);
        let read = move || read(&hub);
        registry.register_collector(ObservableGauge::new(name, help, read));
    }
    for (name, help, read) in GAUGES_BY_PHASE {
        let hub = Arc::clone(hub);
        let read = move || read(&hub);
        registry.register_collector(ObservableGauge::by_label("phase", name, help, read));
    }
}

type Gauge<T> = (&'static str, &'static str, fn(&Hub) -> T);

const GAUGES: [Gauge<u64>; 4] = [
    (
        "queue_depth",
        "Pods about which a message is to be sent, over all sessions",
        |hub| {
            let state = hub.state();
            let queued = |it: &Session| it.queued(state.inputs(), hub::now());
            number(state.sessions().values().map(queued).sum())
        },
    ),
    (
        "desired_workloads",
        "Workloads that ztunnels are to serve",
        |hub| number(hub.state().desired().entries().count()),
    ),
    (
        "seeded",
        "Whether pod-events has sent the desired set; nothing is sent to ztunnels before",
        |hub| u64::from(hub.state().desired().is_seeded()),
    ),
    (
        "descriptors",
        "Descriptors of network namespaces that are open",
        Hub::descriptors,
    ),
];

const GAUGES_BY_PHASE: [Gauge<Counts>; 2] = [
    ("sessions", "Connected ztunnels, by phase", |hub| {
        let state = hub.state();
        let phases = state.sessions().values().map(Session::phase);
        count_sessions(&phases.collect::<Vec<_>>())
    }),
    (
        "workloads",
        "Workloads in connected ztunnels, by phase",
        |hub| {
            let state = hub.state();
            let pods = state.desired().pods();
            let phases = pods.flat_map(|(_, entry)| state.phases(entry, hub::now()));
            count_workloads(&phases.map(|(_, phase)| phase).collect::<Vec<_>>())
        },
    ),
];

type Counts = Vec<(&'static str, u64)>;

fn count_sessions(phases: &[SessionPhase]) -> Counts {
    let names = [
        ("connected", SessionPhase::Connected),
        ("snapshot", SessionPhase::Snapshot),
        ("live", SessionPhase::Live),
    ];
    count_all(&names, phases)
}

fn count_workloads(phases: &[WorkloadPhase]) -> Counts {
    let names = [
        ("queued", WorkloadPhase::Queued),
        ("sent", WorkloadPhase::Sent),
        ("added", WorkloadPhase::Added),
        ("kept", WorkloadPhase::Kept),
        ("refused", WorkloadPhase::Refused),
        ("quarantined", WorkloadPhase::Quarantined),
    ];
    count_all(&names, phases)
}

/// Counts each named phase, even if nothing is in it.
fn count_all<P: PartialEq>(names: &[(&'static str, P)], phases: &[P]) -> Counts {
    let count = |wanted: &P| number(phases.iter().filter(|phase| *phase == wanted).count());
    let counts = names.iter().map(|(name, phase)| (*name, count(phase)));
    counts.collect()
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_counted_even_if_nothing_is_in_it() {
        let found = count_sessions(&[
            SessionPhase::Live,
            SessionPhase::Live,
            SessionPhase::Connected,
        ]);
        assert_eq!(found, [("connected", 1), ("snapshot", 0), ("live", 2)]);
        let found = count_workloads(&[WorkloadPhase::Added, WorkloadPhase::Quarantined]);
        let counts: Vec<_> = found.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [0, 0, 1, 0, 0, 1]);
    }
}
