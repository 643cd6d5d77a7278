//! One pod: everything that happens to it happens here, in order, to its end.
//!
//! A task never waits for a service to come back: it does what can be done, and looks again when something new is
//! known. What must not wait behind a step (the end of a sandbox, a restarted netconfig) interrupts the one step that
//! can take long, the wait for a ztunnel.

mod call;
mod ending;
mod inherit;
mod interrupt;
mod spooled;

use std::{
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};
use workload::{Enrollment, Failure, NetnsId, PodRef, Reason, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    config::Config,
    decide::{Decision, decide_from},
    moment::Moment,
    outputs::Outputs,
    pipeline::{Pipeline, Run, Stop, is_passing},
    plan::{Action, Timing, Wanted, next},
    pod::Pod,
    resolve::Resolved,
    shown::Shown,
    source::{PodKey, Source},
    timeline::Timeline,
};

pub use call::AddCall;
pub use interrupt::Interrupts;
pub use spooled::{Admitted, Settled};

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
    Delete(SandboxRef, oneshot::Sender<bool>),
    /// The source says something new of the pod, or a service is back.
    Look,
    /// netconfig was restarted. Answered when the claims are back, as far as they come back.
    Reclaim(oneshot::Sender<()>),
    /// netconfig sees other rules in a netns than were applied.
    Differs(SandboxRef),
    /// netconfig has let a netns go.
    Released(SandboxRef, NetnsId),
    /// A sandbox ended while nobody listened. Only written down; a look follows.
    Ended(SandboxRef, oneshot::Sender<Settled>),
    /// The pod ran before us and may be in the mesh: its netns is looked for until then. Only written down; a look
    /// follows.
    Inherit(Instant, oneshot::Sender<Result<(), Failure>>),
    /// A pod was let through while nobody listened. Only written down; a look follows.
    Admitted(Admitted, oneshot::Sender<Settled>),
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

/// A pod as people see it, without waiting for what is being done.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Its sandboxes, the current one last.
    pub records: Vec<Record>,
    /// The last failure that has not been mended.
    pub failure: Option<Failure>,
    /// What happened.
    pub timeline: Timeline,
    /// When something is attempted next, if anything is due.
    pub next_attempt: Option<SystemTime>,
}

/// What all tasks have in common.
#[derive(Debug)]
pub struct Shared {
    /// The effects.
    pub pipeline: Pipeline,
    /// Where pods come from.
    pub source: Source,
    /// The settings.
    pub config: Config,
    /// What Kubernetes is told.
    pub outputs: Outputs,
    /// Who hears of what becomes of pods.
    pub shown: Shown,
}

impl Shared {
    /// What a pod should be.
    pub fn decide(&self, pod: &Pod) -> Decision {
        let inventory = self.source.inventory();
        decide_from(&inventory, pod, &self.config.exclude_namespaces)
    }

    fn timing(&self) -> Timing {
        Timing {
            propagation: self.config.propagation_wait(),
            grace: self.config.drain_grace(),
        }
    }
}

/// How often a step that cannot be taken yet is looked at again.
const POLL: Duration = Duration::from_millis(500);

/// The longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How long an enrolment may take that no caller waits for. It is tried again.
const UNHURRIED: Duration = Duration::from_secs(15);

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
    gone_since: Option<Moment>,
    attempts: u32,
    wake: Option<Instant>,
    /// Whether netconfig may not hold what it should.
    unclaimed: bool,
}

fn wall_clock(then: Instant) -> SystemTime {
    SystemTime::now() + then.saturating_duration_since(Instant::now())
}

/// How an action went.
enum Step {
    /// Look again at once.
    Again,
    /// Nothing is left to do.
    Rest,
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
            unclaimed: false,
        };
        task.show();
        task
    }

    /// Does what is asked and what is due, until `finished` finds that nothing is left.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        finished: impl Fn(&PodKey, &[Record], &mpsc::UnboundedReceiver<Command>) -> bool,
    ) {
        while !finished(&self.key, &self.records, &commands) {
            let due = self.wake;
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    None => return,
                },
                () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                    self.advance().await;
                }
            }
            self.show();
        }
    }

    fn show(&self) {
        let view = View {
            records: self.records.clone(),
            failure: self.failure.clone(),
            timeline: self.timeline.clone(),
            next_attempt: self.wake.map(wall_clock),
        };
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
        self.shared.shown.tell(&self.key);
    }

    /// Whoever gets an answer may look at once: what is seen is brought up to date before it.
    async fn obey(&mut self, command: Command) {
        self.seen.count(&command);
        match command {
            Command::Add(call, resolved, mut reply) => {
                let result = {
                    let gone = pin!(reply.closed());
                    self.add(call, *resolved, gone).await
                };
                self.show();
                // A caller who is gone has its answer in the undoing.
                reply.send(result).unwrap_or_default();
            }
            Command::Delete(sandbox, reply) => {
                let deferred = self.delete(&sandbox).await;
                self.show();
                reply.send(deferred).unwrap_or_default();
            }
            Command::Look => self.look_now().await,
            Command::Reclaim(reply) => {
                self.unclaimed = true;
                self.look_now().await;
                self.show();
                reply.send(()).unwrap_or_default();
            }
            Command::Differs(sandbox) => {
                self.unclaimed |= self.index_of(&sandbox).is_some();
                self.look_now().await;
            }
            Command::Released(sandbox, netns) => self.released(&sandbox, netns).await,
            Command::Ended(sandbox, reply) => {
                let settled = self.ended(&sandbox);
                self.show();
                reply.send(settled).unwrap_or_default();
            }
            Command::Inherit(until, reply) => {
                let inherited = self.inherit(until).await;
                self.show();
                reply.send(inherited).unwrap_or_default();
            }
            Command::Admitted(admitted, reply) => {
                let settled = self.admitted(&admitted);
                self.show();
                reply.send(settled).unwrap_or_default();
            }
        }
    }

    /// Something new is known: what waited for a later attempt is attempted now.
    async fn look_now(&mut self) {
        self.attempts = 0;
        self.advance().await;
    }

    fn index_of(&self, sandbox: &SandboxRef) -> Option<usize> {
        self.records
            .iter()
            .position(|record| record.is_meant_by(sandbox))
    }

    /// What is wanted of the current sandbox.
    fn wanted(&mut self, record: &Record) -> Wanted {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory.pod(&self.key).filter(|pod| record.is_of(pod)) else {
            // A pod that nobody has shown yet is not gone.
            if !inventory.is_complete() || record.let_through {
                return Wanted::Unknown;
            }
            return Wanted::Gone {
                since: *self.gone_since.get_or_insert_with(Moment::now),
            };
        };
        self.gone_since = None;
        match self.shared.decide(pod).enrollment {
            Enrollment::Ambient => Wanted::In,
            Enrollment::None | Enrollment::Sidecar => Wanted::Out,
            Enrollment::Unknown => Wanted::Unknown,
        }
    }

    /// Takes the current sandbox the next steps towards what is wanted, and sets when to look again.
    async fn advance(&mut self) {
        self.wake = None;
        if self.unclaimed
            && let Err(failure) = self.reclaim().await
        {
            return self.retry_later(failure);
        }
        self.forget_superseded().await;
        // Each action leads to another state; five are more than any path has.
        for _ in 0..5 {
            if let Err(failure) = self.recognise() {
                return self.retry_later(failure);
            }
            let Some(current) = self.records.last().cloned() else {
                return;
            };
            let wanted = self.wanted(&current);
            let action = next(&current.intent, wanted, Moment::now(), self.shared.timing());
            match self.act(action).await {
                Ok(Step::Again) => self.attempts = 0,
                Ok(Step::Rest) => {
                    self.attempts = 0;
                    return;
                }
                Ok(Step::Wait(wait)) => return self.wake_in(wait),
                Err(failure) => return self.retry_later(failure),
            }
        }
        self.wake_in(POLL);
    }

    async fn act(&mut self, action: Action) -> Result<Step, Failure> {
        if self.has_to_be_found(action) {
            return self.search(action).await;
        }
        let Some(record) = self.records.last_mut() else {
            return Ok(Step::Rest);
        };
        let (pipeline, log) = (&self.shared.pipeline, &mut self.timeline);
        match action {
            Action::Rest => Ok(Step::Rest),
            Action::WaitUntil(then) => Ok(Step::Wait(then.since(Moment::now()))),
            Action::Enroll => self.enroll_unhurried().await,
            Action::Abandon => {
                let failures = pipeline.undo(record, log).await;
                let left = || Failure::new(Reason::DependencyUnavailable, failures.join("; "));
                if failures.is_empty() {
                    Ok(Step::Again)
                } else {
                    Err(left())
                }
            }
            Action::StartLeaving => pipeline.start_leaving(record, log).map(|()| Step::Again),
            Action::Drain => pipeline.drain(record, log).await.map(|()| Step::Again),
            Action::Finish { overdue } => {
                let done = pipeline.finish(record, log, overdue).await?;
                Ok(if done { Step::Again } else { Step::Wait(POLL) })
            }
            Action::Delete { overdue } => self.try_delete(overdue).await,
            Action::LetGo { overdue } => self.let_go(overdue).await,
        }
    }

    /// Enrols the current sandbox because it is wanted, and nobody waits. Anything new of the pod comes first.
    async fn enroll_unhurried(&mut self) -> Result<Step, Failure> {
        let mut stop = pin!(interrupt::anything(self.sent.clone(), self.seen));
        let run = Run {
            deadline: Instant::now() + UNHURRIED,
            stop: stop.as_mut(),
        };
        match self.enroll(run).await {
            Ok(()) => Ok(Step::Again),
            // A look follows when that has passed.
            Err(failure)
                if failure.reason == Reason::Starting && failure.undo_failures.is_empty() =>
            {
                Ok(Step::Rest)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Enrols the current sandbox.
    async fn enroll(&mut self, run: Run<'_>) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        let Some(record) = self.records.last_mut() else {
            return Ok(());
        };
        let inventory = shared.source.inventory();
        if let Some(pod) = inventory.pod(&self.key).filter(|pod| record.is_of(pod)) {
            record.wishes.clone_from(&pod.wishes);
        }
        let stood = Some(record.intent.clone()).filter(Intent::has_stood);
        let broker = shared.pipeline.begin(record)?;
        self.show();
        let Some(record) = self.records.last_mut() else {
            return Ok(());
        };
        shared
            .pipeline
            .enroll(&broker, stood, record, &mut self.timeline, run)
            .await?;
        tracing::info!(pod = %record.pod, uid = %record.pod.uid, sandbox = %record.sandbox, "Enrolled");
        self.failure = None;
        Ok(())
    }

    fn wake_in(&mut self, wait: Duration) {
        let then = Instant::now() + wait;
        self.wake = Some(self.wake.map_or(then, |wake| wake.min(then)));
    }

    /// The wait doubles with each failure; a new event cuts it short.
    fn retry_later(&mut self, failure: Failure) {
        let wait = POLL
            .saturating_mul(1 << self.attempts.min(6))
            .min(LONGEST_WAIT);
        if is_passing(failure.reason) {
            tracing::debug!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will try again");
        } else {
            tracing::warn!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will try again");
        }
        self.attempts = self.attempts.saturating_add(1);
        self.failure = Some(failure);
        self.wake_in(wait);
    }
}
