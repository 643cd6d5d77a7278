//! What pod-events counts.

mod istio;
mod phases;
mod view;

use std::time::Duration;

use inpod_proto::podevents::v1::PodState;
use inpod_service::metrics::{Watched, durations};
use inpod_types::{Enrollment, Failure, Reason};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::time::Instant;

use crate::{
    checkpoint::{Intent, Record},
    drift::DRIFT,
    explain,
    outputs::metrics as outputs,
    registry::Registry as Pods,
    task::{Added, ReplayOutcome, Shared, View as Seen},
};

pub use istio::Istio;
pub use phases::{Entered, Phase, Phases};
use view::View;

/// What is said of a metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name, as it is registered: the prefix comes before it, the unit and `_total` of a counter after.
    pub name: &'static str,
    /// Its label, or none.
    pub labels: &'static str,
    /// What it counts.
    pub help: &'static str,
}

const ADDS: Metric = Metric {
    name: "add_duration",
    labels: "outcome",
    help: "ADDs, by enrollment or, where they failed, by reason",
};
const ADD_PHASES: Metric = Metric {
    name: "add_phase_duration",
    labels: "phase",
    help: "What the time of ADDs goes into: queue (its pod's task, its turn), decide, claim, hand-over (with the wait for a ztunnel), rules (with reading them back), other; the sum of all is that of add_duration",
};
const SPOOLED: Metric = Metric {
    name: "spool_entries",
    labels: "event, result",
    help: "What the plugin wrote down while pod-events was away, by what came of it; admitted is a pod that was let through without a decision",
};
const PODS: Metric = Metric {
    name: "pods",
    labels: "state",
    help: "Pods of this node that have a sandbox, by where they stand",
};
const PODS_REDIRECTED: Metric = Metric {
    name: "pods_redirected",
    labels: "to",
    help: "Pods of this node whose rules are in place, by where those lead: ambient (ztunnel) or sidecar (the proxy in the pod)",
};
const PODS_FAILING: Metric = Metric {
    name: "pods_failing",
    labels: "reason",
    help: "Pods with a failure that is not mended yet, by its reason; ZTUNNEL_QUARANTINED are those in quarantine",
};
const PODS_LET_THROUGH: Metric = Metric {
    name: "pods_let_through",
    labels: "",
    help: "Pods outside of the mesh because nobody could tell whether they belong there, until the source shows them",
};
const ADDS_WAITING: Metric = Metric {
    name: "adds_waiting",
    labels: "",
    help: "ADDs of pods of the mesh that wait for their turn",
};
const ADDS_WORKED_ON: Metric = Metric {
    name: "adds_worked_on",
    labels: "",
    help: "ADDs of pods of the mesh that are worked on, at most max_adds; one that waits for a ztunnel is not",
};
const VIEW_AGE: Metric = Metric {
    name: "view_age_seconds",
    labels: "",
    help: "For how long the view of this node's pods has not been in step with its source; 0 while it is",
};
const RETRIES: Metric = Metric {
    name: "retries",
    labels: "reason",
    help: "Steps of pods that failed and are tried again, by the reason",
};

/// The metrics below the prefix `inpod_pod_events_`, in the order of the documentation, with what their type and unit
/// add to the name.
pub const OWN: &[(Metric, &str)] = &[
    (ADDS, "_seconds"),
    (ADD_PHASES, "_seconds"),
    (ADDS_WAITING, ""),
    (ADDS_WORKED_ON, ""),
    (outputs::LAG, "_seconds"),
    (outputs::PATCHES, "_total"),
    (outputs::UNMET, ""),
    (DRIFT, "_total"),
    (outputs::EVENTS, "_total"),
    (PODS, ""),
    (PODS_FAILING, ""),
    (PODS_LET_THROUGH, ""),
    (PODS_REDIRECTED, ""),
    (RETRIES, "_total"),
    (SPOOLED, "_total"),
    (VIEW_AGE, ""),
];

/// The metrics of the incumbent's names, with the setting `istio_metrics`.
pub const OF_ISTIO: &[(Metric, &str)] = &[(istio::REQUESTS, "_total"), (istio::EVENTS, "_total")];

type ByReason = [(&'static str, &'static str); 1];

/// What tasks count. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    retries: Family<ByReason, Counter>,
}

impl Counters {
    /// A step failed and is tried again.
    pub(crate) fn retry(&self, reason: Reason) {
        let labels = [("reason", reason.name())];
        self.retries.get_or_create(&labels).inc();
    }
}

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
    phases: Family<ByOutcome, Histogram, fn() -> Histogram>,
    spooled: Family<ByEventAndResult, Counter>,
}

impl Metrics {
    /// Declares the metrics of pod-events.
    pub(crate) fn register(registry: &mut Registry, pods: &Pods, shared: &Shared) -> Self {
        let metrics = Self {
            adds: Family::new_with_constructor(durations),
            phases: Family::new_with_constructor(durations),
            spooled: Family::default(),
        };
        let family = metrics.adds.clone();
        registry.register_with_unit(ADDS.name, ADDS.help, Unit::Seconds, family);
        let family = metrics.phases.clone();
        registry.register_with_unit(ADD_PHASES.name, ADD_PHASES.help, Unit::Seconds, family);
        registry.register(SPOOLED.name, SPOOLED.help, metrics.spooled.clone());
        let retries = shared.counters.retries.clone();
        registry.register(RETRIES.name, RETRIES.help, retries);
        watch_pods(registry, pods);
        watch_queue(registry, shared);
        metrics
    }

    /// An ADD has begun.
    pub(crate) fn add(&self, phases: Phases) -> AddTimer {
        AddTimer {
            metrics: self.clone(),
            began: Instant::now(),
            phases,
            outcome: "unanswered",
        }
    }

    /// Something of the spool was looked at. What must wait is looked at again and is not counted yet.
    pub(crate) fn spooled(&self, event: &'static str, settled: &ReplayOutcome) {
        let result = match settled {
            ReplayOutcome::Done => "done",
            ReplayOutcome::Dropped(_) => "dropped",
            ReplayOutcome::Retry(_) => return,
        };
        let labels = [("event", event), ("result", result)];
        self.spooled.get_or_create(&labels).inc();
    }

    fn added(&self, outcome: &'static str, took: Duration, phases: &Phases) {
        let adds = self.adds.get_or_create(&[("outcome", outcome)]);
        adds.observe(took.as_secs_f64());
        for (phase, spent) in phases.spent() {
            let durations = self.phases.get_or_create(&[("phase", phase.name())]);
            durations.observe(spent.as_secs_f64());
        }
    }
}

/// Gauges that count pods when they are read.
fn watch_pods(registry: &mut Registry, pods: &Pods) {
    let counted = pods.clone();
    let read = move || states(&counted);
    registry.register_collector(Watched::by(PODS.labels, PODS.name, PODS.help, read));
    let counted = pods.clone();
    let redirected = move || redirected(&counted);
    let metric = PODS_REDIRECTED;
    registry.register_collector(Watched::by(
        metric.labels,
        metric.name,
        metric.help,
        redirected,
    ));
    let counted = pods.clone();
    let failing = move || {
        let reasons = counted.count(|pod: &Seen| pod.failure.as_ref().map(reason_name));
        let failing = reasons.into_iter().filter_map(|(name, n)| Some((name?, n)));
        failing.collect::<Vec<_>>()
    };
    let metric = PODS_FAILING;
    registry.register_collector(Watched::by(
        metric.labels,
        metric.name,
        metric.help,
        failing,
    ));
    let counted = pods.clone();
    let is_let_through = |pod: &Seen| pod.records.last().is_some_and(|it| it.admitted_unenrolled);
    let let_through = move || {
        let counts = counted.count(is_let_through);
        counts.get(&true).copied().unwrap_or_default()
    };
    let metric = PODS_LET_THROUGH;
    registry.register_collector(Watched::one(metric.name, metric.help, let_through));
}

fn reason_name(failure: &Failure) -> &'static str {
    failure.reason.name()
}

/// Gauges of what ADDs and tasks wait for.
fn watch_queue(registry: &mut Registry, shared: &Shared) {
    let whole = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let admission = shared.admission.clone();
    let waiting = move || whole(admission.waiting());
    registry.register_collector(Watched::one(ADDS_WAITING.name, ADDS_WAITING.help, waiting));
    let admission = shared.admission.clone();
    let working = move || whole(admission.working());
    let metric = ADDS_WORKED_ON;
    registry.register_collector(Watched::one(metric.name, metric.help, working));
    let view = View::of(shared.source.health());
    let age = move || view.seconds();
    registry.register_collector(Watched::one(VIEW_AGE.name, VIEW_AGE.help, age));
}

fn redirected(pods: &Pods) -> Vec<(&'static str, u64)> {
    let counts = pods.count(|view: &Seen| {
        let stands = |record: &&Record| matches!(record.intent, Intent::Enrolled { .. });
        let standing = view.records.last().filter(stands);
        standing.map(|record| record.redirection.is_sidecar())
    });
    let count = |is_sidecar| counts.get(&Some(is_sidecar)).copied().unwrap_or_default();
    vec![("ambient", count(false)), ("sidecar", count(true))]
}

fn states(pods: &Pods) -> Vec<(&'static str, u64)> {
    let counts = pods.count(|view: &Seen| i32::from(explain::state(view.records.last())));
    let count = |state: PodState| counts.get(&i32::from(state)).copied().unwrap_or_default();
    STATES.map(|(state, name)| (name, count(state))).to_vec()
}

/// An ADD that is under way. Dropped without an answer, its caller has gone or its time has run out.
#[derive(Debug)]
pub(crate) struct AddTimer {
    metrics: Metrics,
    began: Instant,
    phases: Phases,
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
        self.metrics
            .added(self.outcome, self.began.elapsed(), &self.phases);
    }
}
