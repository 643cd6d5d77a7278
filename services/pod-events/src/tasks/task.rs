//! The task of a single pod: processes the pod's events in order until nothing is left of the pod.
//!
//! A task never waits for a service to come back: the task does as much as possible and reconciles on the next event.
//! Only the wait for ztunnel can take long; commands that must not queue behind the wait (the end of a sandbox, a
//! restarted netconfig) interrupt it.

mod add;
mod adoption;
mod delete;
mod discovery;
mod drift;
mod interrupt;
mod listeners;
mod next_step;
mod probes;
mod reconcile;
mod replay;
pub(super) mod resolve;
mod settings;
#[cfg(test)]
pub(crate) mod shadow;
mod sidecar;
mod update;
mod view;

use std::{
    net::IpAddr,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use inpod_cni::enrolled::is_disabled;
use inpod_proto::podevents::v1::PodState;
use inpod_service::{Trace, UninstallMode};
use inpod_types::{Enrollment, Failure, NetnsId, PodRef, Reason, SandboxRef};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{
    admission::Admission,
    boottime::BootInstant,
    changes::PodChanges,
    checkpoint::{Checkpoint, Intent, Record},
    clients::Clients,
    config::Config,
    counters::{Counters, Phase},
    decide::{Decision, Policy, decide_from},
    drift::{Drift, DriftKind, RepairBackoff, Repairs},
    leave_mode::LeaveMode,
    pod::{Pod, PodKey},
    source::Source,
    status::StatusReporter,
    tasks::{
        owners::Owners,
        pipeline::{CancelReason, Pipeline, Revisions, Synced},
        plan::{Action, Timing},
        task::resolve::Resolved,
    },
    timeline::Timeline,
    trace,
};

pub(super) use adoption::record_without_netns;
#[cfg(test)]
pub(crate) use discovery::DISCOVERY_DELAY;
pub(super) use discovery::should_be_enrolled;

pub use add::AddCall;
pub(super) use interrupt::Interrupts;
pub use replay::{OfflineAdd, ReplayOutcome};
pub(crate) use settings::is_permission_known;
pub(crate) use view::Evidence;
pub(crate) use view::state;
pub use view::{Refusal, View};

#[derive(Debug)]
pub(super) enum Command {
    Add(
        AddCall,
        Box<Resolved>,
        oneshot::Sender<Result<Added, Failure>>,
    ),
    /// Replies with whether the deletion was deferred.
    Delete(SandboxRef, Trace, oneshot::Sender<bool>),
    /// Sent when the source shows a change of the pod, or a service is back.
    Reconcile,
    /// netconfig was restarted. Replies when every restorable claim is restored.
    Reclaim(oneshot::Sender<()>),
    /// Replies when the pod's effects were verified and repaired, as far as possible now.
    Resync(oneshot::Sender<()>),
    /// netconfig observes rules that differ from the applied rules.
    RulesDrifted(SandboxRef, DriftKind),
    /// netconfig has released a netns.
    NetnsReleased(SandboxRef, NetnsId),
    /// A sandbox ended while pod-events was away. The task only records the end; a reconcile follows.
    ReplayDelete(SandboxRef, oneshot::Sender<ReplayOutcome>),
    /// The pod ran before inpod and may be in the mesh: the task searches for its netns until the given time. The
    /// command is only recorded; a reconcile follows.
    Adopt(Instant, oneshot::Sender<Result<(), Failure>>),
    /// A pod was admitted unenrolled while pod-events was away. The task only records the pod; a reconcile follows.
    ReplayAdd(OfflineAdd, oneshot::Sender<ReplayOutcome>),
}

#[derive(Clone, Debug)]
pub struct Added {
    pub enrollment: Enrollment,
    pub reason: Reason,
    pub pod: PodRef,
}

#[derive(Debug)]
pub struct Shared {
    pub admission: Admission,
    pub counters: Counters,
    pub(super) pipeline: Pipeline,
    pub source: Source,
    pub config: Config,
    pub leave_mode: LeaveMode,
    pub status: StatusReporter,
    pub pod_changes: PodChanges,
    pub repairs: Repairs,
    pub(super) owners: Owners,
}

impl Shared {
    /// Combines the given parts with empty state. `synced` follows the synchronization of the services.
    pub(crate) fn new(
        config: Config,
        source: Source,
        status: StatusReporter,
        leave_mode: LeaveMode,
        clients: Clients,
        checkpoint: Checkpoint,
        synced: watch::Receiver<Synced>,
    ) -> Self {
        Self {
            admission: Admission::new(config.max_adds),
            counters: Counters::default(),
            pipeline: Pipeline {
                clients,
                checkpoint,
                synced,
                revisions: Revisions::default(),
            },
            source,
            config,
            leave_mode,
            status,
            pod_changes: PodChanges::default(),
            repairs: Repairs::default(),
            owners: Owners::default(),
        }
    }

    pub(crate) fn clients(&self) -> &Clients {
        &self.pipeline.clients
    }

    pub(crate) fn synced(&self) -> Synced {
        self.pipeline.synced.borrow().clone()
    }

    pub fn decide(&self, pod: &Pod) -> Decision {
        let inventory = self.source.inventory();
        decide_from(&inventory, pod, &self.policy())
    }

    pub fn policy(&self) -> Policy<'_> {
        Policy {
            is_uninstalling: self.leave_mode.is(UninstallMode::Uninstall),
            ..self.config.policy()
        }
    }

    /// Returns whether the kill switch is set: the plugin then admits pods that stay outside the mesh.
    pub fn is_disabled(&self) -> bool {
        is_disabled(&self.config.plugin_state_dir)
    }

    fn timing(&self) -> Timing {
        Timing {
            propagation: self.config.propagation_wait(),
            grace: self.config.drain_grace(),
        }
    }
}

/// The retry interval of a step that is not possible yet.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Task {
    shared: Arc<Shared>,
    key: Arc<PodKey>,
    view: Arc<Mutex<View>>,
    sent: watch::Receiver<Interrupts>,
    seen: Interrupts,
    /// The records are shared with the view, so the task changes a copy of a record.
    records: Vec<Arc<Record>>,
    failure: Option<Failure>,
    /// The obstacle to the enrolled pod's traffic at the last check.
    blocked: Option<Failure>,
    timeline: Timeline,
    gone_since: Option<BootInstant>,
    attempts: u32,
    wake: Option<Instant>,
    /// The last attempted action, which is retried next.
    next: Option<Action>,
    /// Set if netconfig may have lost claims or rules of the pod.
    unclaimed: bool,
    /// The drift reported by netconfig, until the repair.
    drifted: Option<DriftKind>,
    drift: Drift,
    repair_backoff: RepairBackoff,
    listeners_due: Option<Instant>,
    /// The source's addresses when they were last compared with the netns.
    compared_addresses: Vec<IpAddr>,
    discovery_due: Option<Instant>,
    /// The time from which a missing address of the pod is a failure.
    start_due: Option<Instant>,
    /// The exemption before inpod's rules that netconfig's present run has confirmed.
    probe_exemption: Option<probes::ProbeExemption>,
    evidence: Evidence,
}

pub(super) fn wall_clock(then: Instant) -> SystemTime {
    SystemTime::now() + then.saturating_duration_since(Instant::now())
}

pub(crate) fn log_refusal(key: &PodKey, sandbox: &SandboxRef, trace: &Trace, failure: &Failure) {
    let (namespace, name) = key;
    tracing::warn!(
        pod = format!("{namespace}/{name}"), %sandbox, trace_id = trace.id(),
        %failure, undo = ?failure.undo_failures, "Refused",
    );
}

enum Step {
    /// Plan the next action at once.
    Continue,
    Done,
    Wait(Duration),
}

impl Task {
    pub(crate) fn new(
        shared: Arc<Shared>,
        key: Arc<PodKey>,
        mut records: Vec<Arc<Record>>,
        view: Arc<Mutex<View>>,
        sent: watch::Receiver<Interrupts>,
    ) -> Self {
        records.sort_by_key(|record| record.revision);
        // The claims of an interrupted enrollment are not in the checkpoint.
        let is_interrupted = |record: &Arc<Record>| record.intent == Intent::Enrolling;
        let unclaimed = records.iter().any(is_interrupted);
        let timeline = view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .timeline
            .clone();
        let task = Self {
            shared,
            key,
            view,
            sent,
            seen: Interrupts::default(),
            records,
            failure: None,
            blocked: None,
            timeline,
            gone_since: None,
            attempts: 0,
            wake: None,
            next: None,
            unclaimed,
            drifted: None,
            drift: Drift::default(),
            repair_backoff: RepairBackoff::default(),
            listeners_due: None,
            compared_addresses: Vec::new(),
            discovery_due: None,
            start_due: None,
            probe_exemption: None,
            evidence: Evidence::default(),
        };
        task.publish_view();
        task
    }

    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Box<Command>>,
        finished: impl Fn(&Arc<PodKey>, bool, &mpsc::UnboundedReceiver<Box<Command>>) -> bool,
    ) {
        while !finished(&self.key, self.is_idle(), &commands) {
            let due = self.due();
            tokio::select! {
                command = commands.recv() => match command {
                    // Boxed so that an idle task does not hold memory for its largest future.
                    Some(command) => Box::pin(self.handle(*command)).await,
                    None => return,
                },
                () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                    Box::pin(self.reconcile()).await;
                }
            }
            self.publish_view();
        }
    }

    fn is_idle(&self) -> bool {
        self.records.is_empty() && self.wake.is_none()
    }

    fn due(&self) -> Option<Instant> {
        // The listeners are checked when nothing else is left to do; until then, another step is due.
        let listeners = self.listeners_due.filter(|_| !self.records.is_empty());
        self.wake.or(listeners)
    }

    fn publish_view(&self) {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        let is_changed = view.records != self.records
            || view.failure != self.failure
            || view.blocked != self.blocked;
        if is_changed {
            self.shared
                .owners
                .replace(&self.key, &view.records, &self.records);
            view.since = view.state_since(&self.records);
            view.failure.clone_from(&self.failure);
            view.blocked.clone_from(&self.blocked);
        }
        let unserved = view.unserved.take();
        let unserved = unserved.map(|failure| (view.sandbox_with_ztunnel().cloned(), failure));
        // Replacing even equal records keeps only a single copy of each record.
        view.records.clone_from(&self.records);
        if let Some((sandbox, failure)) = unserved
            && view.sandbox_with_ztunnel() == sandbox.as_ref()
        {
            view.unserved = Some(failure);
        }
        view.next_attempt = self.wake.map(wall_clock);
        view.drift.clone_from(&self.drift);
        view.evidence = self.evidence;
        view.next = self.next;
        if state(self.records.last().map(|record| &**record)) == PodState::Enrolled {
            view.refusal = None;
        }
        drop(view);
        if is_changed {
            self.shared.pod_changes.notify(&self.key);
        }
    }

    /// Handles a command. The view is published before the reply, because the caller may read the view at once.
    async fn handle(&mut self, command: Command) {
        self.seen.count(&command);
        match command {
            Command::Add(call, resolved, mut reply) => {
                if reply.is_closed() {
                    // The caller left before any work began.
                    return;
                }
                call.phases.set(Phase::Other);
                let (about, trace) = (call.sandbox.clone(), call.trace.clone());
                let known = self.failure.clone();
                let result = {
                    let gone = pin!(reply.closed());
                    trace::scope(trace.clone(), self.add(call, *resolved, gone)).await
                };
                if result.is_err() && self.is_enrolled(&about) {
                    // The refused ADD changed nothing; a verification finds the pod's own failure.
                    (self.failure, self.unclaimed) = (known, true);
                    self.wake_in(Duration::ZERO);
                }
                self.publish_view();
                if let Err(failure) = &result
                    && reply.is_closed()
                {
                    log_refusal(&self.key, &about, &trace, failure);
                }
                // If the caller is gone, the enrollment was undone.
                reply.send(result).unwrap_or_default();
            }
            Command::Delete(sandbox, trace, reply) => {
                let deferred = trace::scope(trace, self.delete(&sandbox)).await;
                self.publish_view();
                reply.send(deferred).unwrap_or_default();
            }
            Command::Reconcile => self.reconcile_now().await,
            Command::Reclaim(reply) | Command::Resync(reply) => {
                self.unclaimed = true;
                self.reconcile_now().await;
                self.publish_view();
                reply.send(()).unwrap_or_default();
            }
            Command::RulesDrifted(sandbox, kind) => self.rules_drifted(&sandbox, kind).await,
            Command::NetnsReleased(sandbox, netns) => self.netns_released(&sandbox, netns).await,
            Command::ReplayDelete(sandbox, reply) => {
                let settled = self.replay_delete(&sandbox);
                self.publish_view();
                reply.send(settled).unwrap_or_default();
            }
            Command::Adopt(until, reply) => {
                let adopted = self.adopt(until).await;
                self.publish_view();
                reply.send(adopted).unwrap_or_default();
            }
            Command::ReplayAdd(admitted, reply) => {
                let settled = self.replay_add(&admitted);
                self.publish_view();
                reply.send(settled).unwrap_or_default();
            }
        }
    }

    /// Reconciles without waiting for the retry interval, because something has changed.
    async fn reconcile_now(&mut self) {
        self.attempts = 0;
        self.reconcile().await;
    }

    fn is_enrolled(&self, sandbox: &SandboxRef) -> bool {
        let index = self.index_of(sandbox);
        let record = index.and_then(|index| self.records.get(index));
        record.is_some_and(|record| matches!(record.intent, Intent::Enrolled { .. }))
    }

    fn index_of(&self, sandbox: &SandboxRef) -> Option<usize> {
        self.records
            .iter()
            .position(|record| record.matches_request(sandbox))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{enrolled, record, shared};

    struct Running {
        _directory: tempfile::TempDir,
        shared: Arc<Shared>,
        commands: mpsc::UnboundedSender<Box<Command>>,
        _sent: watch::Sender<Interrupts>,
    }

    /// Returns a task whose pod the source does not show yet, so that the task has nothing to do.
    async fn idle_task() -> (impl Future<Output = ()> + Send + 'static, Running) {
        let directory = tempfile::tempdir().unwrap();
        let shared = shared(directory.path()).await;
        let known = Record {
            admitted_unenrolled: true,
            ..record("c1")
        };
        let key = Arc::new((known.pod.namespace.clone(), known.pod.name.clone()));
        let (commands, received) = mpsc::unbounded_channel();
        let (sent, interrupts) = watch::channel(Interrupts::default());
        let records = vec![known.into()];
        let task = Task::new(
            Arc::clone(&shared),
            key,
            records,
            Arc::default(),
            interrupts,
        );
        let running = Running {
            _directory: directory,
            shared,
            commands,
            _sent: sent,
        };
        (task.run(received, |_, _, _| false), running)
    }

    /// A due check that is not performed would keep the task busy without a pause.
    #[tokio::test]
    async fn a_handover_leaves_no_check_due() {
        let directory = tempfile::tempdir().unwrap();
        let (_leave, requested) = watch::channel(Some(UninstallMode::Handover));
        let mut shared = Arc::into_inner(shared(directory.path()).await).unwrap();
        shared.leave_mode = LeaveMode::manual(requested);
        let known = Record {
            intent: enrolled(),
            ..record("c1")
        };
        let key = Arc::new((known.pod.namespace.clone(), known.pod.name.clone()));
        let interrupts = watch::channel(Interrupts::default()).1;
        let records = vec![known.into()];
        let mut task = Task::new(shared.into(), key, records, Arc::default(), interrupts);
        task.listeners_due = Some(Instant::now());
        task.reconcile().await;
        assert_eq!(task.due(), None);
    }

    #[tokio::test]
    async fn a_task_without_work_is_small_whatever_it_can_do() {
        let (task, _running) = idle_task().await;
        let bytes = size_of_val(&task);
        assert!(bytes <= 2048, "{bytes} bytes");
    }

    #[tokio::test]
    async fn a_reconcile_that_changes_nothing_notifies_nobody() {
        let (task, running) = idle_task().await;
        tokio::spawn(task);
        let mut changes = running.shared.pod_changes.subscribe();
        let (reply, answer) = oneshot::channel();
        running
            .commands
            .send(Box::new(Command::Resync(reply)))
            .unwrap();
        answer.await.unwrap();
        assert!(changes.try_recv().is_err());
    }
}
