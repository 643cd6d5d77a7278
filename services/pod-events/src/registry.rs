//! All tasks of the node, and which sandbox belongs to which.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};
use workload::{Failure, NetworkName, Reason, Revision, SandboxRef, Workload};

use crate::{
    checkpoint::Record,
    pipeline::workload_of,
    source::PodKey,
    task::{AddCall, Added, Command, Shared, Task, View},
};

/// All tasks of the node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Registry {
    shared: Arc<Shared>,
    tasks: Arc<Mutex<HashMap<PodKey, Handle>>>,
}

#[derive(Debug)]
struct Handle {
    commands: mpsc::UnboundedSender<Command>,
    view: Arc<Mutex<View>>,
}

impl Registry {
    /// A registry with a task for every pod that the checkpoint knows.
    pub fn new(shared: Arc<Shared>, records: BTreeMap<SandboxRef, Record>) -> Self {
        let registry = Self {
            shared,
            tasks: Arc::default(),
        };
        let mut by_pod: BTreeMap<PodKey, Vec<Record>> = BTreeMap::new();
        for record in records.into_values() {
            let key = (record.pod.namespace.clone(), record.pod.name.clone());
            by_pod.entry(key).or_default().push(record);
        }
        for (key, records) in by_pod {
            registry.start(&mut registry.tasks(), key, records);
        }
        registry
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<PodKey, Handle>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, tasks: &mut HashMap<PodKey, Handle>, key: PodKey, records: Vec<Record>) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let view = Arc::default();
        let task = Task::new(
            Arc::clone(&self.shared),
            key.clone(),
            records,
            Arc::clone(&view),
        );
        tasks.insert(key, Handle { commands, view });
        let registry = Arc::clone(&self.tasks);
        tokio::spawn(task.run(receiver, move |key, records, commands| {
            // Commands are sent under the same lock: none can slip in between the look and the end.
            let mut tasks = registry.lock().unwrap_or_else(PoisonError::into_inner);
            let finished = records.is_empty() && commands.is_empty();
            if finished {
                tasks.remove(key);
            }
            finished
        }));
    }

    /// Asks a pod's task, which is started where there is none.
    fn ask(&self, key: &PodKey, command: Command) {
        let mut tasks = self.tasks();
        if !tasks.contains_key(key) {
            // A new task has nothing to do until the command is there, and ends for want of it only under this lock.
            self.start(&mut tasks, key.clone(), Vec::new());
        }
        if let Some(task) = tasks.get(key) {
            // The receiver lives as long as the entry.
            task.commands.send(command).unwrap_or_default();
        }
    }

    /// A sandbox was created.
    ///
    /// # Errors
    ///
    /// As the task says.
    pub async fn add(&self, key: &PodKey, call: AddCall) -> Result<Added, Failure> {
        let (reply, answer) = oneshot::channel();
        self.ask(key, Command::Add(call, reply));
        answer
            .await
            .unwrap_or_else(|_| Err(Failure::new(Reason::Internal, "the pod's task has ended")))
    }

    /// A sandbox ends. Tells whether that was written down for later; an unknown one is done.
    pub async fn delete(&self, sandbox: &SandboxRef) -> bool {
        let Some(key) = self.owner(sandbox) else {
            return false;
        };
        let (reply, answer) = oneshot::channel();
        self.ask(&key, Command::Delete(sandbox.clone(), reply));
        answer.await.unwrap_or(true)
    }

    /// The pod of a sandbox.
    fn owner(&self, sandbox: &SandboxRef) -> Option<PodKey> {
        let tasks = self.tasks();
        let holds = |handle: &Handle| {
            view_of(handle)
                .records
                .iter()
                .any(|record| record.sandbox == *sandbox)
        };
        tasks
            .iter()
            .find(|(_, handle)| holds(handle))
            .map(|(key, _)| key.clone())
    }

    /// The record of a sandbox.
    pub fn record(&self, sandbox: &SandboxRef) -> Option<Record> {
        self.records()
            .into_iter()
            .find(|record| record.sandbox == *sandbox)
    }

    /// Every record.
    pub fn records(&self) -> Vec<Record> {
        self.views()
            .into_values()
            .flat_map(|view| view.records)
            .collect()
    }

    /// The recorded sandboxes of a network.
    pub fn sandboxes_of(&self, network: &NetworkName) -> Vec<SandboxRef> {
        let sandboxes = self.records().into_iter().map(|record| record.sandbox);
        sandboxes
            .filter(|sandbox| sandbox.network_name == *network)
            .collect()
    }

    /// Every pod that has a task, as people see it.
    pub fn views(&self) -> BTreeMap<PodKey, View> {
        self.tasks()
            .iter()
            .map(|(key, handle)| (key.clone(), view_of(handle)))
            .collect()
    }

    /// A pod, as people see it.
    pub fn view(&self, key: &PodKey) -> Option<View> {
        self.tasks().get(key).map(view_of)
    }

    /// Tells the tasks of pods of which something new is known.
    pub fn look(&self, wanted: impl Fn(&PodKey) -> bool) {
        for (key, handle) in self.tasks().iter() {
            if wanted(key) {
                handle.commands.send(Command::Look).unwrap_or_default();
            }
        }
    }

    /// netconfig has let a netns go.
    pub fn released(&self, sandbox: SandboxRef, netns: workload::NetnsId) {
        if let Some(key) = self.owner(&sandbox) {
            self.ask(&key, Command::Released(sandbox, netns));
        }
    }

    /// Has every task claim its netns again; returns when all have tried.
    pub async fn reclaim(&self) {
        let answers: Vec<_> = {
            let tasks = self.tasks();
            let ask = |handle: &Handle| {
                let (reply, answer) = oneshot::channel();
                handle
                    .commands
                    .send(Command::Reclaim(reply))
                    .unwrap_or_default();
                answer
            };
            tasks.values().map(ask).collect()
        };
        // A task that has ended has nothing to claim.
        join_all(answers).await;
    }

    /// The desired set: the current sandbox of every pod that is in the mesh or on its way. Read from the checkpoint,
    /// which knows of every step before it is taken: an ADD that is under way is in the set.
    ///
    /// # Errors
    ///
    /// When the checkpoint cannot be read.
    pub fn workloads(&self) -> Result<(Revision, Vec<Workload>), Failure> {
        // Taken first: what is added meanwhile has a later revision and is not undone by the set.
        let revision = self.shared.pipeline.revisions.next();
        let mut current: BTreeMap<PodKey, Record> = BTreeMap::new();
        for record in self.shared.pipeline.checkpoint.records()? {
            let key = (record.pod.namespace.clone(), record.pod.name.clone());
            if current
                .get(&key)
                .is_none_or(|known| known.revision < record.revision)
            {
                current.insert(key, record);
            }
        }
        let served = current
            .into_values()
            .filter(|record| record.intent.is_served() && record.netns_id.is_some());
        Ok((
            revision,
            served.map(|record| workload_of(&record)).collect(),
        ))
    }
}

fn view_of(handle: &Handle) -> View {
    handle
        .view
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}
