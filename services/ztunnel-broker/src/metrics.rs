//! What the broker counts.

use std::{sync::Arc, time::Duration};

use daemon::metrics::{Watched, durations};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{hub::Hub, session::Stage};

type ByVerbAndResult = [(&'static str, &'static str); 2];

/// What ztunnels answered.
#[derive(Clone, Debug)]
pub struct Metrics {
    answers: Family<ByVerbAndResult, Counter>,
    waits: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            answers: Family::default(),
            waits: durations(),
        }
    }
}

impl Metrics {
    /// A ztunnel has answered a message.
    pub(crate) fn answered(&self, verb: &'static str, acknowledged: bool, wait: Duration) {
        let result = if acknowledged { "ack" } else { "nack" };
        let labels = [("verb", verb), ("result", result)];
        self.answers.get_or_create(&labels).inc();
        self.waits.observe(wait.as_secs_f64());
    }
}

/// Declares the broker's metrics.
pub(crate) fn register(registry: &mut Registry, hub: &Arc<Hub>) {
    let Metrics { answers, waits } = hub.metrics().clone();
    let help = "Messages that ztunnels answered, by verb and result";
    registry.register("answers", help, answers);
    let help = "From a message to ztunnel to its answer";
    registry.register_with_unit("answer_wait", help, Unit::Seconds, waits);
    let help = "Connected ztunnels, by how far they are";
    let read = {
        let hub = Arc::clone(hub);
        move || sessions(&hub.stages())
    };
    registry.register_collector(Watched::by("phase", "sessions", help, read));
    let help = "Workloads that ztunnels are to serve";
    let read = {
        let hub = Arc::clone(hub);
        move || u64::try_from(hub.desired()).unwrap_or(u64::MAX)
    };
    registry.register_collector(Watched::one("desired_workloads", help, read));
}

fn sessions(stages: &[Stage]) -> [(&'static str, u64); 3] {
    let count = |wanted| {
        let found = stages.iter().filter(|stage| **stage == wanted).count();
        u64::try_from(found).unwrap_or(u64::MAX)
    };
    [
        ("connected", count(Stage::Connected)),
        ("snapshot", count(Stage::Snapshot)),
        ("live", count(Stage::Live)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_told_also_where_no_ztunnel_is_in_it() {
        let found = sessions(&[Stage::Live, Stage::Live, Stage::Connected]);
        assert_eq!(found, [("connected", 1), ("snapshot", 0), ("live", 2)]);
    }
}
