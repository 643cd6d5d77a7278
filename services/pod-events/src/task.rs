//! One pod: everything that happens to it happens here, in order, to its end.

mod call;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};
use workload::{Enrollment, Failure, NetnsId, PodRef, Reason, SandboxRef};

use crate::{
    checkpoint::{Intent, Record},
    config::Config,
    decide::{Decision, decide},
    pipeline::{Caller, Pipeline},
    plan::{Action, Timing, Wanted, next},
    pod::Pod,
    source::{PodKey, Source},
    timeline::Timeline,
};

pub use call::AddCall;

/// What a task is asked.
#[derive(Debug)]
pub enum Command {
    /// A sandbox was created.
    Add(AddCall, oneshot::Sender<Result<Added, Failure>>),
    /// A sandbox ends. Answered with whether that was written down for later.
    Delete(SandboxRef, oneshot::Sender<bool>),
    /// The source says something new of the pod.
    Look,
    /// netconfig was restarted. Answered when the claims are back, as far as they come back.
    Reclaim(oneshot::Sender<()>),
    /// netconfig has let a netns go that nothing leads to any more.
    Released(SandboxRef, NetnsId),
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
}

impl Shared {
    /// What a pod should be.
    pub fn decide(&self, pod: &Pod) -> Decision {
        let namespace = self.source.inventory().namespace(&pod.pod.namespace);
        decide(pod, &namespace, &self.config.exclude_namespaces)
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

/// How long an enrolment may take that no caller waits for.
const UNHURRIED: Duration = Duration::from_secs(30);

/// One pod's task.
#[derive(Debug)]
pub(crate) struct Task {
    shared: Arc<Shared>,
    key: PodKey,
    view: Arc<Mutex<View>>,
    records: Vec<Record>,
    failure: Option<Failure>,
    timeline: Timeline,
    gone_since: Option<SystemTime>,
    attempts: u32,
    wake: Option<Instant>,
}

impl Task {
    /// A task for a pod, with what the checkpoint says of it.
    pub(crate) fn new(
        shared: Arc<Shared>,
        key: PodKey,
        mut records: Vec<Record>,
        view: Arc<Mutex<View>>,
    ) -> Self {
        records.sort_by_key(|record| record.revision);
        let task = Self {
            shared,
            key,
            view,
            records,
            failure: None,
            timeline: Timeline::default(),
            gone_since: None,
            attempts: 0,
            wake: None,
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
        };
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Add(call, reply) => {
                let result = self.add(call, &reply).await;
                // A caller who is gone has its answer in the undoing.
                reply.send(result).unwrap_or_default();
            }
            Command::Delete(sandbox, reply) => {
                let deferred = self.delete(&sandbox).await;
                reply.send(deferred).unwrap_or_default();
            }
            Command::Look => self.look_now().await,
            Command::Reclaim(reply) => {
                self.reclaim().await;
                reply.send(()).unwrap_or_default();
            }
            Command::Released(sandbox, netns) => self.released(&sandbox, netns).await,
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
            .position(|record| record.sandbox == *sandbox)
    }

    /// What is wanted of the current sandbox.
    fn wanted(&mut self, uid: &workload::PodUid) -> Wanted {
        let inventory = self.shared.source.inventory();
        let Some(pod) = inventory.pod(&self.key).filter(|pod| pod.pod.uid == *uid) else {
            return Wanted::Gone {
                since: *self.gone_since.get_or_insert_with(SystemTime::now),
            };
        };
        self.gone_since = None;
        match self.shared.decide(pod).enrollment {
            Enrollment::Ambient => Wanted::In,
            Enrollment::None | Enrollment::Sidecar | Enrollment::Unknown => Wanted::Out,
        }
    }

    /// Takes the current sandbox the next steps towards what is wanted, and sets when to look again.
    async fn advance(&mut self) {
        self.wake = None;
        self.forget_superseded().await;
        // Each action leads to another state; five are more than any path has.
        for _ in 0..5 {
            let Some(current) = self.records.last() else {
                return;
            };
            let (uid, intent) = (current.pod.uid.clone(), current.intent.clone());
            let wanted = self.wanted(&uid);
            let action = next(&intent, wanted, SystemTime::now(), self.shared.timing());
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
        let Some(record) = self.records.last_mut() else {
            return Ok(Step::Rest);
        };
        let (pipeline, log) = (&self.shared.pipeline, &mut self.timeline);
        match action {
            Action::Rest => Ok(Step::Rest),
            Action::WaitUntil(then) => Ok(Step::Wait(
                then.duration_since(SystemTime::now()).unwrap_or_default(),
            )),
            Action::Enroll => {
                let caller = Caller {
                    deadline: Instant::now() + UNHURRIED,
                    gone: &|| false,
                };
                pipeline.enroll(record, log, caller).await?;
                tracing::info!(pod = %record.pod, sandbox = %record.sandbox, "Enrolled");
                self.failure = None;
                Ok(Step::Again)
            }
            Action::Abandon => {
                pipeline.undo(record, log).await;
                Ok(Step::Again)
            }
            Action::StartLeaving => pipeline.start_leaving(record, log).map(|()| Step::Again),
            Action::Drain => pipeline.drain(record, log).await.map(|()| Step::Again),
            Action::Finish { overdue } => {
                let done = pipeline.finish(record, log, overdue).await?;
                Ok(if done { Step::Again } else { Step::Wait(POLL) })
            }
            Action::Delete { overdue, announced } => self.try_delete(overdue, announced).await,
        }
    }

    /// Forgets the current sandbox if it has ended. A runtime's word alone ends no sandbox that lives on and whose pod
    /// the source still shows.
    async fn try_delete(&mut self, overdue: bool, announced: bool) -> Result<Step, Failure> {
        let Some(record) = self.records.last_mut() else {
            return Ok(Step::Rest);
        };
        let shown = self
            .shared
            .source
            .inventory()
            .pod(&self.key)
            .is_some_and(|pod| pod.pod.uid == record.pod.uid && !pod.terminal);
        let untouched = matches!(record.intent, Intent::Out) && record.netns_id.is_none();
        let bound = overdue && !(announced && shown);
        if !(untouched || bound || self.shared.pipeline.has_ended(record).await?) {
            return Ok(Step::Wait(POLL));
        }
        self.shared.pipeline.forget(record).await?;
        tracing::info!(pod = %record.pod, sandbox = %record.sandbox, "Deleted");
        self.records.pop();
        self.failure = None;
        Ok(Step::Again)
    }

    /// An earlier sandbox of the pod has nothing to wait for: its claim goes, and the broker knows that the pod's UID
    /// belongs to a later one.
    async fn forget_superseded(&mut self) {
        let current = self.records.pop();
        let mut kept = Vec::new();
        for mut record in std::mem::take(&mut self.records) {
            if !matches!(record.intent, Intent::Deleting { .. }) {
                kept.push(record);
            } else if let Err(failure) = self.shared.pipeline.forget(&mut record).await {
                tracing::warn!(sandbox = %record.sandbox, %failure, "Cannot forget an earlier sandbox yet");
                self.wake = Some(Instant::now() + POLL);
                kept.push(record);
            }
        }
        self.records = kept;
        self.records.extend(current);
    }

    fn wake_in(&mut self, wait: Duration) {
        let then = Instant::now() + wait;
        self.wake = Some(self.wake.map_or(then, |wake| wake.min(then)));
    }

    /// The wait doubles with each failure; a new event cuts it short.
    fn retry_later(&mut self, failure: Failure) {
        tracing::warn!(pod = format!("{}/{}", self.key.0, self.key.1), %failure, "Will try again");
        let wait = POLL
            .saturating_mul(1 << self.attempts.min(6))
            .min(LONGEST_WAIT);
        self.attempts = self.attempts.saturating_add(1);
        self.failure = Some(failure);
        self.wake_in(wait);
    }

    async fn delete(&mut self, sandbox: &SandboxRef) -> bool {
        let Some(index) = self.index_of(sandbox) else {
            return false;
        };
        if let Some(record) = self.records.get_mut(index) {
            record.intent = Intent::Deleting {
                since: SystemTime::now(),
            };
            if let Err(error) = self.shared.pipeline.checkpoint.write(record) {
                // A DEL never fails: what is remembered in memory alone is acted on all the same.
                tracing::error!(
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "Cannot write a deletion down"
                );
            }
        }
        self.timeline.note(format!("sandbox {sandbox} ends"));
        self.look_now().await;
        self.index_of(sandbox).is_some()
    }

    async fn reclaim(&mut self) {
        for mut record in std::mem::take(&mut self.records) {
            let held = !matches!(record.intent, Intent::Out) || record.netns_id.is_some();
            let there = match self
                .shared
                .pipeline
                .reclaim(&mut record, &mut self.timeline)
                .await
            {
                _ if !held => true,
                Ok(there) => there,
                Err(failure) => {
                    self.retry_later(failure);
                    true
                }
            };
            if !there {
                record.intent = Intent::Deleting {
                    since: SystemTime::UNIX_EPOCH,
                };
            }
            self.records.push(record);
        }
        self.wake_in(Duration::ZERO);
    }

    async fn released(&mut self, sandbox: &SandboxRef, netns: NetnsId) {
        let released = self
            .records
            .iter_mut()
            .find(|record| record.sandbox == *sandbox);
        if let Some(record) = released.filter(|record| record.netns_id == Some(netns)) {
            record.intent = Intent::Deleting {
                since: SystemTime::UNIX_EPOCH,
            };
            self.look_now().await;
        }
    }
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
