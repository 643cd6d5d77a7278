//! The tasks of all pods of the node.

mod adoption;
mod queries;
mod replay;
mod search;
mod supervise;
mod unserved;
mod wakeups;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future, stream};
use inpod_proto::podevents::v1::PodState;
use inpod_types::{Failure, PodUid, Reason, Revision, SandboxRef, Workload};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    checkpoint::{Intent, Record},
    counters::Phase,
    drift::DriftKind,
    pod::{Pod, PodKey},
    tasks::{
        in_flight::InFlight,
        pipeline::{is_transient, workload_of},
        task::{
            AddCall, Added, Command, Interrupts, Refusal, Shared, Task, View, log_refusal,
            resolve::resolve, state,
        },
    },
    trace,
};

/// Limits how long a synchronization waits for the slowest task. After the limit, the task claims its netns on its own.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(5);

const MAX_CONCURRENT_VERIFICATIONS: usize = 4;

/// The number of failed pods whose view outlives their task.
const MAX_FAILED: usize = 256;

const RETRY_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Debug)]
pub struct Registry {
    shared: Arc<Shared>,
    tasks: Arc<Mutex<Tasks>>,
    /// Set once the pods that ran before inpod are recorded.
    adopted: Arc<AtomicBool>,
    in_flight: InFlight,
}

#[derive(Debug, Default)]
struct Tasks {
    running: BTreeMap<Arc<PodKey>, Handle>,
    failed: VecDeque<(Arc<PodKey>, View)>,
}

#[derive(Debug)]
struct Handle {
    commands: mpsc::UnboundedSender<Box<Command>>,
    interrupts: watch::Sender<Interrupts>,
    view: Arc<Mutex<View>>,
}

impl Handle {
    /// Returns whether the task is still running.
    fn send(&self, command: Command) -> bool {
        self.interrupts.send_modify(|sent| sent.count(&command));
        self.commands.send(Box::new(command)).is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self) -> View {
        self.lock().clone()
    }
}

impl Tasks {
    fn take_failed(&mut self, key: &PodKey) -> View {
        let index = self.failed.iter().position(|(known, _)| **known == *key);
        let failed = index.and_then(|index| self.failed.remove(index));
        failed.map(|(_, view)| view).unwrap_or_default()
    }

    /// Sets the refusal in the view of the pod's task or, without a task, among the failed pods.
    fn set_refusal(&mut self, key: &Arc<PodKey>, refusal: Option<Arc<Refusal>>) {
        let Some(handle) = self.running.get(key) else {
            let mut view = self.take_failed(key);
            view.refusal = refusal;
            return self.remember_failed(Arc::clone(key), view);
        };
        let mut view = handle.lock();
        if state(view.records.last().map(|record| &**record)) != PodState::Enrolled {
            view.refusal = refusal;
        }
    }

    fn remember_failed(&mut self, key: Arc<PodKey>, view: View) {
        self.failed.retain(|(known, _)| *known != key);
        if view.failure.is_some() || view.refusal.is_some() {
            self.failed.push_back((key, view));
        }
        if self.failed.len() > MAX_FAILED {
            self.failed.pop_front();
        }
    }
}

impl Registry {
    pub fn new(shared: Arc<Shared>, records: BTreeMap<SandboxRef, Record>) -> Self {
        let registry = Self {
            shared,
            tasks: Arc::default(),
            adopted: Arc::default(),
            in_flight: InFlight::default(),
        };
        let mut by_pod: BTreeMap<PodKey, Vec<Arc<Record>>> = BTreeMap::new();
        for record in records.into_values() {
            let of_pod = by_pod.entry(key_of(&record)).or_default();
            of_pod.push(record.into());
        }
        for (key, records) in by_pod {
            registry.start(&mut registry.tasks(), key, records);
        }
        registry
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, tasks: &mut Tasks, key: PodKey, records: Vec<Arc<Record>>) {
        let key = Arc::new(key);
        let (commands, receiver) = mpsc::unbounded_channel();
        let (interrupts, sent) = watch::channel(Interrupts::default());
        let failed = tasks.take_failed(&key);
        let view = Arc::new(Mutex::new(View {
            timeline: failed.timeline,
            refusal: failed.refusal,
            ..View::default()
        }));
        let task = Task::new(
            Arc::clone(&self.shared),
            Arc::clone(&key),
            records,
            Arc::clone(&view),
            sent,
        );
        let of = Arc::clone(&key);
        tasks.running.insert(
            key,
            Handle {
                commands,
                interrupts,
                view,
            },
        );
        let registry = Arc::clone(&self.tasks);
        let run = task.run(receiver, move |key, is_idle, commands| {
            // Commands are sent under the same lock, so no command can arrive between this check and the end of the
            // task.
            let mut tasks = registry.lock().unwrap_or_else(PoisonError::into_inner);
            let finished = is_idle && commands.is_empty();
            if finished && let Some(handle) = tasks.running.remove(key) {
                tasks.remember_failed(Arc::clone(key), handle.view());
            }
            finished
        });
        self.supervise(of, run);
    }

    /// Starts the pod's task if there is none.
    fn dispatch(&self, key: &PodKey, command: Command) {
        let mut tasks = self.tasks();
        let records = match tasks.running.get(key) {
            Some(handle) if !handle.commands.is_closed() => None,
            // The task panicked, and restarts from its checkpoint.
            Some(_) => Some(self.checkpointed(key)),
            // A task that ended regularly left no record. Reading the checkpoint here would cost more with each
            // pod on the node.
            None => Some(Vec::new()),
        };
        if let Some(records) = records {
            // A new task is idle until the command arrives, and can only end under this lock.
            self.start(&mut tasks, key.clone(), records);
        }
        if let Some(handle) = tasks.running.get(key) {
            handle.send(command);
        }
    }

    fn checkpointed(&self, key: &PodKey) -> Vec<Arc<Record>> {
        let records = self.shared.pipeline.checkpoint.records();
        let records = records.unwrap_or_default().into_iter();
        let of_pod = records.filter(|record| key_of(record) == *key);
        of_pod.map(Arc::new).collect()
    }

    /// Handles an ADD. Waits for restarting services as long as the caller waits. A DEL of the sandbox cancels the ADD.
    pub async fn add(&self, key: &PodKey, call: AddCall) -> Result<Added, Failure> {
        let added = self.add_owned(key, &call).await;
        if let Err(failure) = &added {
            log_refusal(key, &call.sandbox, &call.trace, failure);
        }
        self.remember_refusal(key, &call, added.as_ref().err());
        added
    }

    /// Remembers why an ADD was refused, or that an ADD was not. An ADD that its own DEL has cancelled was not refused.
    fn remember_refusal(&self, key: &PodKey, call: &AddCall, failure: Option<&Failure>) {
        if failure.is_some_and(|failure| failure.reason == Reason::SandboxNotCurrent) {
            return;
        }
        let uid_of = |pod: &Pod| pod.pod.uid.clone();
        let uid = || self.shared.source.inventory().pod(key).map(uid_of);
        let refusal = failure.map(|failure| {
            Arc::new(Refusal {
                uid: call.uid.clone().or_else(uid),
                failure: failure.clone(),
            })
        });
        let key = Arc::new(key.clone());
        self.tasks().set_refusal(&key, refusal);
        if failure.is_some() {
            self.shared.pod_changes.notify(&key);
        }
    }

    /// Refuses a container of another pod before anything is written: the claim and the checkpoint bear the sandbox's
    /// name, whichever pod a caller names.
    async fn add_owned(&self, key: &PodKey, call: &AddCall) -> Result<Added, Failure> {
        let mut in_flight = self
            .in_flight
            .begin(key, call)
            .map_err(|other| of_another_pod(&call.sandbox, &other))?;
        if let Some(other) = self.other_owner(key, &call.sandbox) {
            return Err(of_another_pod(&call.sandbox, &other));
        }
        tokio::select! {
            biased;
            failure = in_flight.cancelled() => Err(failure),
            added = self.add_until(key, call) => added,
        }
    }

    async fn add_until(&self, key: &PodKey, call: &AddCall) -> Result<Added, Failure> {
        let until = call.work_deadline;
        loop {
            let resolved = {
                let _decides = call.phases.enter(Phase::Decide);
                resolve(&self.shared, key, call).await?
            };
            let enrollment = resolved.enrollment();
            let (reply, answer) = oneshot::channel();
            call.phases.set(Phase::Queue);
            self.dispatch(key, Command::Add(call.clone(), Box::new(resolved), reply));
            let ended = |_| Err(Failure::new(Reason::Internal, "the pod's task has ended"));
            match answer.await.unwrap_or_else(ended) {
                Err(failure) if is_transient(failure.reason) => {
                    if Instant::now() + RETRY_INTERVAL >= until {
                        return Err(Failure {
                            reason: Reason::DependencyUnavailable,
                            ..failure
                        });
                    }
                    sleep(RETRY_INTERVAL).await;
                    self.shared.pipeline.wait_ready(enrollment, until).await?;
                }
                other => return other,
            }
        }
    }

    /// Returns whether the deletion was deferred.
    pub async fn delete(&self, sandbox: &SandboxRef) -> bool {
        // Cancels an ADD that waits for a permit, for its pod or for ztunnel. The pod's task first undoes the ADD.
        let adding = self.in_flight.cancel(sandbox).await;
        let Some(key) = self.owner(sandbox).or_else(|| adding.map(Arc::new)) else {
            return false;
        };
        let (reply, answer) = oneshot::channel();
        self.dispatch(
            &key,
            Command::Delete(sandbox.clone(), trace::current(), reply),
        );
        answer.await.unwrap_or(true)
    }

    /// Enables the discovery of pods without a record, once the pods that ran before inpod are recorded.
    pub fn enable_discovery(&self) {
        self.adopted.store(true, Ordering::Relaxed);
    }

    /// Makes the tasks of the given pods verify and repair their effects and retry pending work. Returns when each task
    /// has finished.
    pub(crate) async fn resync(&self, pods: &BTreeSet<PodKey>) {
        self.verify_each(pods.iter().cloned().collect(), Command::Resync)
            .await;
    }

    pub fn netns_released(&self, sandbox: SandboxRef, netns: inpod_types::NetnsId) {
        if let Some(key) = self.owner(&sandbox) {
            self.dispatch(&key, Command::NetnsReleased(sandbox, netns));
        }
    }

    /// Handles netconfig's observation of a netns. The pod's task repairs a difference, even a difference that arises
    /// after netconfig applied the rules and before the task learns of the success.
    pub fn observed(&self, sandbox: &SandboxRef, fingerprint: &str, intact: bool) {
        let Some(key) = self.owner(sandbox) else {
            return;
        };
        let records = self.view(&key).map(|view| view.records).unwrap_or_default();
        let Some(record) = records.iter().find(|record| record.sandbox == *sandbox) else {
            return;
        };
        let kind = DriftKind::classify(fingerprint, intact);
        if let Some(applied) = record.intent.fingerprint() {
            if intact && applied == fingerprint {
                return;
            }
            let (namespace, name) = &*key;
            tracing::warn!(pod = format!("{namespace}/{name}"), %sandbox, fingerprint, %kind, "A pod's rules have drifted");
        } else if intact || !matches!(record.intent, Intent::Enrolling | Intent::Adopted) {
            return;
        }
        self.dispatch(&key, Command::RulesDrifted(sandbox.clone(), kind));
    }

    /// Makes all tasks claim their netns again. Returns when all tasks have tried, or after a timeout; the remaining
    /// tasks continue.
    pub async fn reclaim(&self) {
        let (registry, pods) = (self.clone(), self.keys());
        let all = tokio::spawn(async move { registry.verify_each(pods, Command::Reclaim).await });
        if timeout(RECLAIM_TIMEOUT, all).await.is_err() {
            tracing::warn!("Some pods have not claimed their netns again yet");
        }
    }

    /// Makes the tasks of the given pods verify their pods, a few at a time: netconfig and this process would keep the
    /// memory that verifying all pods at once needs.
    async fn verify_each(
        &self,
        pods: Vec<PodKey>,
        command: impl Fn(oneshot::Sender<()>) -> Command,
    ) {
        let verify = |key: PodKey| {
            let (reply, answer) = oneshot::channel();
            if let Some(handle) = self.tasks().running.get(&key) {
                handle.send(command(reply));
            }
            // A task that ends meanwhile has nothing left to verify.
            answer
        };
        let answers = stream::iter(pods).map(verify);
        let answered = answers.buffer_unordered(MAX_CONCURRENT_VERIFICATIONS);
        answered.for_each(|_| future::ready(())).await;
    }

    /// Returns the desired set: the current sandbox of every pod that is enrolled, or being enrolled, with ztunnel. An
    /// ending pod and its successor of the same name both count. The set is read from the checkpoint, which contains
    /// ADDs in flight.
    pub fn workloads(&self) -> Result<(Revision, Vec<Workload>), Failure> {
        // The revision is issued first: workloads added meanwhile have a later revision and survive this set.
        let revision = self.shared.pipeline.revisions.next();
        let mut current: BTreeMap<PodUid, Record> = BTreeMap::new();
        for record in self.shared.pipeline.checkpoint.records()? {
            let uid = record.pod.uid.clone();
            if current
                .get(&uid)
                .is_none_or(|known| known.revision < record.revision)
            {
                current.insert(uid, record);
            }
        }
        let served = current
            .into_values()
            .filter(|record| record.intent.has_effects() && !record.redirection.is_sidecar())
            .filter(|record| record.netns_id.is_some() || record.has_unknown_netns());
        Ok((
            revision,
            served.map(|record| workload_of(&record)).collect(),
        ))
    }
}

fn of_another_pod(sandbox: &SandboxRef, (namespace, name): &PodKey) -> Failure {
    let container = &sandbox.container_id;
    let message = format!("container {container} belongs to the pod {namespace}/{name}");
    Failure::new(Reason::InvalidField, message).at_field("sandbox.container_id")
}

fn key_of(record: &Record) -> PodKey {
    (record.pod.namespace.clone(), record.pod.name.clone())
}
