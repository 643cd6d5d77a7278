//! Metrics of the broker.

use std::{sync::Arc, time::Duration};

use inpod_service::metrics::{ObservableGauge, duration_histogram};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{
    hub::Hub,
    nack::{Nack, NackKind},
    session::Stage,
    session_view::Progress,
};

type ByVerbAndResult = [(&'static str, &'static str); 2];
type ByKind = [(&'static str, &'static str); 1];

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
            let labels = [("kind", kind_name(nack.kind))];
            self.refusals.get_or_create(&labels).inc();
        }
    }
}

fn kind_name(kind: NackKind) -> &'static str {
    match kind {
        NackKind::StartFailure => "start-failure",
        NackKind::ReadError => "read-error",
        NackKind::ProtocolError => "protocol-error",
        NackKind::Other => "other",
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
    watch_sessions(registry, hub);
    watch_workloads(registry, hub);
}

fn watch_sessions(registry: &mut Registry, hub: &Arc<Hub>) {
    let help = "Connected ztunnels, by phase";
    let read = reading(hub, |hub| sessions(&hub.stages()));
    registry.register_collector(ObservableGauge::by_label("phase", "sessions", help, read));
    let help = "Pods that wait in the queues of all sessions";
    let read = reading(hub, |hub| number(hub.queued()));
    registry.register_collector(ObservableGauge::new("queue_depth", help, read));
}

fn watch_workloads(registry: &mut Registry, hub: &Arc<Hub>) {
    let help = "Workloads that ztunnels are to serve";
    let read = reading(hub, |hub| number(hub.desired()));
    registry.register_collector(ObservableGauge::new("desired_workloads", help, read));
    let help = "Whether pod-events has sent the desired set; nothing is sent to ztunnels before";
    let read = reading(hub, |hub| u64::from(hub.is_seeded()));
    registry.register_collector(ObservableGauge::new("seeded", help, read));
    let help = "Workloads in connected ztunnels, by phase";
    let read = reading(hub, |hub| workloads(&hub.progress()));
    registry.register_collector(ObservableGauge::by_label("phase", "workloads", help, read));
    let help = "Descriptors of network namespaces that are open";
    let read = reading(hub, |hub| hub.descriptors());
    registry.register_collector(ObservableGauge::new("descriptors", help, read));
}

fn reading<T>(hub: &Arc<Hub>, read: fn(&Hub) -> T) -> impl Fn() -> T + Send + Sync + use<T> {
    let hub = Arc::clone(hub);
    move || read(&hub)
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn sessions(stages: &[Stage]) -> [(&'static str, u64); 3] {
    let count = |wanted| number(stages.iter().filter(|stage| **stage == wanted).count());
    [
        ("connected", count(Stage::Connected)),
        ("snapshot", count(Stage::Snapshot)),
        ("live", count(Stage::Live)),
    ]
}

fn workloads(progress: &[Progress]) -> [(&'static str, u64); 6] {
    let count = |wanted| number(progress.iter().filter(|it| **it == wanted).count());
    [
        ("queued", count(Progress::Queued)),
        ("sent", count(Progress::Sent)),
        ("added", count(Progress::Added)),
        ("kept", count(Progress::Kept)),
        ("refused", count(Progress::Refused)),
        ("quarantined", count(Progress::Quarantined)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_counted_even_if_no_ztunnel_is_in_it() {
        let found = sessions(&[Stage::Live, Stage::Live, Stage::Connected]);
        assert_eq!(found, [("connected", 1), ("snapshot", 0), ("live", 2)]);
    }

    #[test]
    fn every_phase_of_a_workload_is_counted_even_if_none_is_in_it() {
        let found = workloads(&[Progress::Added, Progress::Added, Progress::Quarantined]);
        let names = found.map(|(name, _)| name);
        assert_eq!(names.len(), 6);
        assert_eq!(found.map(|(_, count)| count), [0, 0, 2, 0, 0, 1]);
    }
}
