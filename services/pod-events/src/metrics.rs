//! The metrics of pod-events.

mod view_age;

use std::sync::Arc;

use inpod_proto::podevents::v1::PodState;
use inpod_service::metrics::{ObservableGauge, duration_histogram};
use inpod_types::Failure;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::time::Instant;

use crate::{
    checkpoint::{Intent, Record},
    counters::{Metric, Phases},
    drift::DRIFT,
    status::metrics as status,
    tasks::{self, Added, Registry as Pods, ReplayOutcome, Shared, View},
};

const ADDS: Metric = Metric {
    name: "add_duration",
    labels: "outcome",
    help: "Duration of ADDs, by enrollment or, if they failed, by reason",
};
const ADD_PHASES: Metric = Metric {
    name: "add_phase_duration",
    labels: "phase",
    help: "Time that ADDs spend per phase: queue (waiting for the pod's task and for a concurrency slot), decide, claim, hand-over (including the wait for ztunnel), rules (including reading them back), other; the phases add up to add_duration",
};
const SPOOLED: Metric = Metric {
    name: "spool_entries",
    labels: "event, result",
    help: "Events that the plugin spooled while pod-events was unavailable, by result; admitted is a pod that was admitted unenrolled",
};
const PODS: Metric = Metric {
    name: "pods",
    labels: "state",
    help: "Pods of this node that have a sandbox, by state",
};
const PODS_REDIRECTED: Metric = Metric {
    name: "pods_redirected",
    labels: "to",
    help: "Pods of this node whose rules are in place, by target: ambient (ztunnel) or sidecar (the proxy in the pod)",
};
const PODS_FAILING: Metric = Metric {
    name: "pods_failing",
    labels: "reason",
    help: "Pods with an unresolved failure, including pods whose ADD fails, by reason; ZTUNNEL_QUARANTINED counts pods in quarantine",
};
const PODS_LET_THROUGH: Metric = Metric {
    name: "pods_let_through",
    labels: "",
    help: "Pods that were admitted unenrolled because it was not known whether they belong to the mesh, until the source shows them",
};
const ADDS_WAITING: Metric = Metric {
    name: "adds_waiting",
    labels: "",
    help: "ADDs of pods in the mesh that wait for a concurrency slot",
};
const ADDS_IN_PROGRESS: Metric = Metric {
    name: "adds_worked_on",
    labels: "",
    help: "ADDs of pods in the mesh that hold a concurrency slot, at most max_adds; an ADD that waits for ztunnel holds none",
};
const VIEW_AGE: Metric = Metric {
    name: "view_age_seconds",
    labels: "",
    help: "How long the view of this node's pods has been out of sync with its source; 0 while in sync",
};
const RETRIES: Metric = Metric {
    name: "retries",
    labels: "reason",
    help: "Retries of failed steps of pods, by reason",
};

/// The metrics with the prefix `inpod_pod_events_`, in the order of the documentation, each with the suffix of
/// its type and unit.
pub const OWN: &[(Metric, &str)] = &[
    (ADDS, "_seconds"),
    (ADD_PHASES, "_seconds"),
    (ADDS_WAITING, ""),
    (ADDS_IN_PROGRESS, ""),
    (status::LAG, "_seconds"),
    (status::PATCHES, "_total"),
    (status::UNMET, ""),
    (DRIFT, "_total"),
    (status::EVENTS, "_total"),
    (PODS, ""),
    (PODS_FAILING, ""),
    (PODS_LET_THROUGH, ""),
    (PODS_REDIRECTED, ""),
    (RETRIES, "_total"),
    (SPOOLED, "_total"),
    (VIEW_AGE, ""),
];

type ByOutcome = [(&'static str, String); 1];
type ByPhase = [(&'static str, &'static str); 1];
type ByEventAndResult = [(&'static str, &'static str); 2];

const STATES: [(PodState, &str); 5] = [
    (PodState::Out, "out"),
    (PodState::Enrolling, "enrolling"),
    (PodState::Enrolled, "enrolled"),
    (PodState::Withdrawing, "withdrawing"),
    (PodState::Deleting, "deleting"),
];

#[derive(Clone, Debug)]
pub struct Metrics {
    adds: Family<ByOutcome, Histogram, fn() -> Histogram>,
    phases: Family<ByPhase, Histogram, fn() -> Histogram>,
    spooled: Family<ByEventAndResult, Counter>,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry, pods: &Pods, shared: &Shared) -> Self {
        let metrics = Self {
            adds: Family::new_with_constructor(duration_histogram),
            phases: Family::new_with_constructor(duration_histogram),
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

    pub(crate) fn start_add(&self, phases: Phases) -> AddTimer {
        AddTimer {
            metrics: self.clone(),
            began: Instant::now(),
            phases,
            outcome: "unanswered".to_owned(),
        }
    }

    /// Counts a settled event of the spool. A waiting event is not counted until settled.
    pub(crate) fn spooled(&self, event: &'static str, settled: &ReplayOutcome) {
        let result = match settled {
            ReplayOutcome::Done => "done",
            ReplayOutcome::Dropped(_) => "dropped",
            ReplayOutcome::Retry(_) => return,
        };
        let labels = [("event", event), ("result", result)];
        self.spooled.get_or_create(&labels).inc();
    }
}

/// Registers gauges that count pods at each scrape.
fn watch_pods(registry: &mut Registry, pods: &Pods) {
    let mut register = |metric: Metric, count: fn(&Pods) -> Vec<(&'static str, u64)>| {
        let pods = pods.clone();
        let read = move || count(&pods);
        let (name, help) = (metric.name, metric.help);
        registry.register_collector(ObservableGauge::by_label(metric.labels, name, help, read));
    };
    register(PODS, states);
    register(PODS_REDIRECTED, redirected);
    register(PODS_FAILING, failing);
    let pods = pods.clone();
    let is_admitted_unenrolled =
        |pod: &View| pod.records.last().is_some_and(|it| it.admitted_unenrolled);
    let let_through = move || {
        let counts = pods.count(is_admitted_unenrolled);
        counts.get(&true).copied().unwrap_or_default()
    };
    let metric = PODS_LET_THROUGH;
    registry.register_collector(ObservableGauge::new(metric.name, metric.help, let_through));
}

fn failing(pods: &Pods) -> Vec<(&'static str, u64)> {
    let reason = |failure: &Failure| failure.reason.name();
    let reasons = pods.count(|pod: &View| pod.last_failure(|_| true).map(reason));
    let failing = reasons.into_iter();
    failing.filter_map(|(name, n)| Some((name?, n))).collect()
}

/// Registers gauges of the ADD queue and the view's age.
fn watch_queue(registry: &mut Registry, shared: &Shared) {
    let whole = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let admission = shared.admission.clone();
    let waiting = move || whole(admission.waiting());
    let metric = ADDS_WAITING;
    registry.register_collector(ObservableGauge::new(metric.name, metric.help, waiting));
    let admission = shared.admission.clone();
    let working = move || whole(admission.working());
    let metric = ADDS_IN_PROGRESS;
    registry.register_collector(ObservableGauge::new(metric.name, metric.help, working));
    let age = view_age::track(shared.source.health());
    registry.register_collector(ObservableGauge::new(VIEW_AGE.name, VIEW_AGE.help, age));
}

fn redirected(pods: &Pods) -> Vec<(&'static str, u64)> {
    let counts = pods.count(|view: &View| {
        let is_enrolled = |record: &&Arc<Record>| matches!(record.intent, Intent::Enrolled { .. });
        let enrolled = view.records.last().filter(is_enrolled);
        enrolled.map(|record| record.redirection.is_sidecar())
    });
    let count = |is_sidecar| counts.get(&Some(is_sidecar)).copied().unwrap_or_default();
    vec![("ambient", count(false)), ("sidecar", count(true))]
}

fn states(pods: &Pods) -> Vec<(&'static str, u64)> {
    let state = |record: &Arc<Record>| tasks::state(Some(record));
    let counts = pods.count(|view: &View| view.records.last().map(state));
    let count = |state| counts.get(&Some(state)).copied().unwrap_or_default();
    STATES.map(|(state, name)| (name, count(state))).to_vec()
}

/// Measures an ADD. Dropped without an answer, it counts the caller as gone or late.
#[derive(Debug)]
pub(crate) struct AddTimer {
    metrics: Metrics,
    began: Instant,
    phases: Phases,
    outcome: String,
}

impl AddTimer {
    pub(crate) fn finish(mut self, added: &Result<Added, Failure>) {
        self.outcome = match added {
            Ok(added) => added.enrollment.to_string(),
            Err(failure) => failure.reason.name().to_owned(),
        };
    }
}

impl Drop for AddTimer {
    fn drop(&mut self) {
        let metrics = &self.metrics;
        let adds = metrics
            .adds
            .get_or_create(&[("outcome", self.outcome.clone())]);
        adds.observe(self.began.elapsed().as_secs_f64());
        for (phase, spent) in self.phases.spent() {
            let durations = metrics.phases.get_or_create(&[("phase", phase.name())]);
            durations.observe(spent.as_secs_f64());
        }
    }
}
