//! One pod: everything that happens to it happens here, in order, to its end.
//!
//! A task never waits for a service to come back: it does what can be done, and looks again when something new is
//! known. What must not wait behind a step (the end of a sandbox, a restarted netconfig) interrupts the one step that
//! can take long, the wait for a ztunnel.

mod add;
mod adoption;
mod delete;
mod discovery;
mod drift;
mod interrupt;
mod listeners;
mod reconcile;
mod replay;
mod settings;
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
use inpod_service::{Leave, Trace};
use inpod_types::{Enrollment, Failure, NetnsId, PodRef, Reason, SandboxRef};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{
    admission::Admission,
    boottime::BootInstant,
    checkpoint::Record,
    config::Config,
    decide::{Decision, Policy, decide_from},
    drift::{Drift, DriftKind, RepairBackoff, Repairs},
    metrics::{Counters, Phase},
    outputs::Outputs,
    pipeline::{CancelReason, Pipeline},
    plan::{Action, Timing},
    pod::Pod,
    registry::Owners,
    resolve::Resolved,
    shown::Shown,
    source::{PodKey, Source},
    timeline::Timeline,
    trace,
    uninstall::LeaveMode,
};

pub(crate) use adoption::record_without_netns;
pub(crate) use discovery::should_be_enrolled;

pub use add::AddCall;
pub use interrupt::Interrupts;
pub use replay::{OfflineAdd, ReplayOutcome};
pub(crate) use settings::is_permission_known;
pub use view::View;

/// What a task is asked.
#[derive(Debug)]
pub enum Command {
    /// A sandbox was created.
    Add(
        AddCall,
        Box<Resolved>,
        oneshot::Sender<Result<Added, Failure>>,
    ),
    /// A sandbox ends. Answered with whether that was written down for later.
    Delete(SandboxRef, Trace, oneshot::Sender<bool>),
    /// The source says something new of the pod, or a service is back.
    Reconcile,
    /// netconfig was restarted. Answered when the claims are back, as far as they come back.
    Reclaim(oneshot::Sender<()>),
    /// A person wants it looked at. Answered when what is in place was verified and mended, as far as that can be now.
    Resync(oneshot::Sender<()>),
    /// netconfig sees other rules in a netns than were applied.
    RulesDrifted(SandboxRef, DriftKind),
    /// netconfig has let a netns go.
    NetnsReleased(SandboxRef, NetnsId),
    /// A sandbox ended while nobody listened. Only written down; a look follows.
    ReplayDelete(SandboxRef, oneshot::Sender<ReplayOutcome>),
    /// The pod ran before us and may be in the mesh: its netns is looked for until then. Only written down; a look
    /// follows.
    Adopt(Instant, oneshot::Sender<Result<(), Failure>>),
    /// A pod was let through while nobody listened. Only written down; a look follows.
    ReplayAdd(OfflineAdd, oneshot::Sender<ReplayOutcome>),
}

/// The answer to `Add`.
#[derive(Clone, Debug)]
pub struct Added {
    /// What was decided.
    pub enrollment: Enrollment,
    /// Why.
    pub reason: Reason,
    /// The pod.
    pub pod: PodRef,
}

/// What all tasks have in common.
#[derive(Debug)]
pub struct Shared {
    /// How many ADDs are worked on at once.
    pub admission: Admission,
    /// What tasks count.
    pub counters: Counters,
    /// The effects.
    pub pipeline: Pipeline,
    /// Where pods come from.
    pub source: Source,
    /// The settings.
    pub config: Config,
    /// Whether inpod is to leave the node.
    pub leave_mode: LeaveMode,
    /// What Kubernetes is told.
    pub outputs: Outputs,
    /// Who hears of what becomes of pods.
    pub shown: Shown,
    /// How often something was repaired.
    pub repairs: Repairs,
    /// Which pod has which sandbox.
    pub owners: Owners,
}

impl Shared {
    /// What a pod should be.
    pub fn decide(&self, pod: &Pod) -> Decision {
        let inventory = self.source.inventory();
        decide_from(&inventory, pod, &self.policy())
    }

    /// Who joins the mesh.
    pub fn policy(&self) -> Policy<'_> {
        Policy {
            is_uninstalling: self.leave_mode.is(Leave::Uninstall),
            ..self.config.policy()
        }
    }

    /// Whether the kill switch is set: what the plugin passes stays outside.
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

/// How often a step that cannot be taken yet is looked at again.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// One pod's task.
#[derive(Debug)]
pub(crate) struct Task {
    shared: Arc<Shared>,
    key: PodKey,
    view: Arc<Mutex<View>>,
    sent: watch::Receiver<Interrupts>,
    seen: Interrupts,
    records: Vec<Record>,
    failure: Option<Failure>,
    timeline: Timeline,
    gone_since: Option<BootInstant>,
    attempts: u32,
    wake: Option<Instant>,
    /// What was attempted last, and is attempted next.
    next: Option<Action>,
    /// Whether netconfig may not hold what it should.
    unclaimed: bool,
    /// What netconfig sees that is not as it was left.
    drifted: Option<DriftKind>,
    drift: Drift,
    repair_backoff: RepairBackoff,
    /// When to see whether ztunnel still listens.
    listeners_due: Option<Instant>,
    /// The addresses that the source showed when they were last compared with those in the netns.
    compared_addresses: Vec<IpAddr>,
    /// When to look for the netns of a pod that no verb was seen for.
    discovery_due: Option<Instant>,
}

fn wall_clock(then: Instant) -> SystemTime {
    SystemTime::now() + then.saturating_duration_since(Instant::now())
}

/// The one line of an ADD that failed. What was left behind is part of it.
pub(crate) fn log_refusal(key: &PodKey, sandbox: &SandboxRef, trace: &Trace, failure: &Failure) {
    let (namespace, name) = key;
    tracing::warn!(
        pod = format!("{namespace}/{name}"), %sandbox, trace_id = trace.id(),
        %failure, undo = ?failure.undo_failures, "Refused",
    );
}

/// How an action went.
enum Step {
    /// Look again at once.
    Continue,
    /// Nothing is left to do.
    Done,
    /// Look again after a while.
    Wait(Duration),
}

impl Task {
    /// A task for a pod, with what the checkpoint says of it.
    pub(crate) fn new(
        shared: Arc<Shared>,
        key: PodKey,
        mut records: Vec<Record>,
        view: Arc<Mutex<View>>,
        sent: watch::Receiver<Interrupts>,
    ) -> Self {
        records.sort_by_key(|record| record.revision);
        view.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .records
            .clone_from(&records);
        let task = Self {
            shared,
            key,
            view,
            sent,
            seen: Interrupts::default(),
            records,
            failure: None,
            timeline: Timeline::default(),
            gone_since: None,
            attempts: 0,
            wake: None,
            next: None,
            unclaimed: false,
            drifted: None,
            drift: Drift::default(),
            repair_backoff: RepairBackoff::default(),
            listeners_due: None,
            compared_addresses: Vec::new(),
            discovery_due: None,
        };
        task.publish_view();
        task
    }

    /// Does what is asked and what is due, until `finished` finds that nothing is left.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        finished: impl Fn(&PodKey, bool, &mpsc::UnboundedReceiver<Command>) -> bool,
    ) {
        while !finished(&self.key, self.is_idle(), &commands) {
            let due = self.due();
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.handle(command).await,
                    None => return,
                },
                () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                    self.advance().await;
                }
            }
            self.publish_view();
        }
    }

    /// Whether nothing is known and nothing is due.
    fn is_idle(&self) -> bool {
        self.records.is_empty() && self.wake.is_none()
    }

    fn due(&self) -> Option<Instant> {
        // They are looked at where the pod rests; until then something else is due.
        let listeners = self.listeners_due.filter(|_| !self.records.is_empty());
        self.wake.or(listeners)
    }

    fn publish_view(&self) {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        let owners = &self.shared.owners;
        owners.replace(&self.key, &view.records, &self.records);
        *view = View {
            since: view.state_since(&self.records),
            records: self.records.clone(),
            failure: self.failure.clone(),
            timeline: self.timeline.clone(),
            next_attempt: self.wake.map(wall_clock),
            drift: self.drift.clone(),
            next: self.next,
        };
        drop(view);
        self.shared.shown.tell(&self.key);
    }

    /// Whoever gets an answer may look at once: what is seen is brought up to date before it.
    async fn handle(&mut self, command: Command) {
        self.seen.count(&command);
        match command {
            Command::Add(call, resolved, mut reply) => {
                if reply.is_closed() {
                    // Nothing was begun for it.
                    return;
                }
                call.phases.set(Phase::Other);
                let (about, trace) = (call.sandbox.clone(), call.trace.clone());
                let result = {
                    let gone = pin!(reply.closed());
                    trace::on_behalf_of(trace.clone(), self.add(call, *resolved, gone)).await
                };
                self.publish_view();
                if let Err(failure) = &result
                    && reply.is_closed()
                {
                    log_refusal(&self.key, &about, &trace, failure);
                }
                // A caller who is gone has its answer in the undoing.
                reply.send(result).unwrap_or_default();
            }
            Command::Delete(sandbox, trace, reply) => {
                let deferred = trace::on_behalf_of(trace, self.delete(&sandbox)).await;
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

    /// Something new is known: what waited for a later attempt is attempted now.
    async fn reconcile_now(&mut self) {
        self.attempts = 0;
        self.advance().await;
    }

    fn index_of(&self, sandbox: &SandboxRef) -> Option<usize> {
        self.records
            .iter()
            .position(|record| record.matches_request(sandbox))
    }
}
