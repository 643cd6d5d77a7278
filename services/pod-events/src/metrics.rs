//! What pod-events counts.

use std::time::Duration;

use daemon::metrics::{Watched, durations};
use inpod_proto::podevents::v1::PodState;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::time::Instant;
use workload::{Enrollment, Failure};

use crate::{
    explain,
    registry::Registry as Pods,
    task::{Added, Settled, View},
};

type ByOutcome = [(&'static str, &'static str); 1];
type ByEventAndResult = [(&'static str, &'static str); 2];

/// Every state that a pod with a sandbox can be in.
const STATES: [(PodState, &str); 5] = [
    (PodState::Out, "out"),
    (PodState::Enrolling, "enrolling"),
    (PodState::Enrolled, "enrolled"),
    (PodState::Withdrawing, "withdrawing"),
    (PodState::Deleting, "deleting"),
];

/// What became of ADDs, and of what was not told in time.
#[derive(Clone, Debug)]
pub struct Metrics {
    adds: Family<ByOutcome, Histogram, fn() -> Histogram>,
    spooled: Family<ByEventAndResult, Counter>,
}

impl Metrics {
    /// Declares the metrics of pod-events.
    pub(crate) fn register(registry: &mut Registry, pods: &Pods) -> Self {
        let metrics = Self {
            adds: Family::new_with_constructor(durations),
            spooled: Family::default(),
        };
        let help = "ADDs, by enrollment or, where they failed, by reason";
        registry.register_with_unit("add_duration", help, Unit::Seconds, metrics.adds.clone());
        let help = "What the plugin wrote down while pod-events was away, by what came of it; \
                    admitted is a pod that was let through without a decision";
        registry.register("spool_entries", help, metrics.spooled.clone());
        let help = "Pods of this node that have a sandbox, by where they stand";
        let pods = pods.clone();
        registry.register_collector(Watched::by("state", "pods", help, move || states(&pods)));
        metrics
    }

    /// An ADD begins.
    pub(crate) fn add(&self) -> AddTimer {
        AddTimer {
            metrics: self.clone(),
            began: Instant::now(),
            outcome: "unanswered",
        }
    }

    /// Something of the spool was looked at. What must wait is looked at again and is not counted yet.
    pub(crate) fn spooled(&self, event: &'static str, settled: &Settled) {
        let result = match settled {
            Settled::Done => "done",
            Settled::Dropped(_) => "dropped",
            Settled::Later(_) => return,
        };
        let labels = [("event", event), ("result", result)];
        self.spooled.get_or_create(&labels).inc();
    }

    fn added(&self, outcome: &'static str, took: Duration) {
        let adds = self.adds.get_or_create(&[("outcome", outcome)]);
        adds.observe(took.as_secs_f64());
    }
}

fn states(pods: &Pods) -> Vec<(&'static str, u64)> {
    let counts = pods.count(|view: &View| i32::from(explain::state(view.records.last())));
    let count = |state: PodState| counts.get(&i32::from(state)).copied().unwrap_or_default();
    STATES.map(|(state, name)| (name, count(state))).to_vec()
}

/// An ADD that is under way. Dropped without an answer, its caller has gone or its time has run out.
#[derive(Debug)]
pub(crate) struct AddTimer {
    metrics: Metrics,
    began: Instant,
    outcome: &'static str,
}

impl AddTimer {
    /// It is answered.
    pub(crate) fn answered(mut self, added: &Result<Added, Failure>) {
        self.outcome = match added {
            Ok(added) => match added.enrollment {
                Enrollment::None => "none",
                Enrollment::Ambient => "ambient",
                Enrollment::Sidecar => "sidecar",
                Enrollment::Unknown => "unknown",
            },
            Err(failure) => failure.reason.name(),
        };
    }
}

impl Drop for AddTimer {
    fn drop(&mut self) {
        self.metrics.added(self.outcome, self.began.elapsed());
    }
}
