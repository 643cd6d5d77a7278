use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use inpod_types::{NetworkName, SandboxRef};

use super::{Handle, Registry};
use crate::{
    checkpoint::Record,
    pod::PodKey,
    tasks::{in_flight::AddWait, task::View},
};

impl Registry {
    /// Returns the wait of the pod's last unanswered ADD.
    pub(crate) fn add_wait(&self, key: &PodKey) -> Option<AddWait> {
        self.in_flight.wait_of(key)
    }

    pub(crate) fn owner(&self, sandbox: &SandboxRef) -> Option<Arc<PodKey>> {
        let tasks = self.tasks();
        let holds = |handle: &Handle| {
            let view = handle.lock();
            let mut records = view.records.iter();
            records.any(|record| record.matches_request(sandbox))
        };
        let mut pods = self.shared.owners.candidates(sandbox).into_iter();
        pods.find(|key| tasks.running.get(key).is_some_and(holds))
    }

    /// Returns the other pod that owns a container, if any.
    pub(super) fn other_owner(&self, key: &PodKey, sandbox: &SandboxRef) -> Option<Arc<PodKey>> {
        let mut pods = self.shared.owners.candidates(sandbox).into_iter();
        pods.find(|owner| **owner != *key)
    }

    pub fn record(&self, sandbox: &SandboxRef) -> Option<Arc<Record>> {
        let key = self.owner(sandbox)?;
        let view = self.view(&key)?;
        let mut records = view.records.into_iter();
        records.find(|record| record.matches_request(sandbox))
    }

    pub fn records(&self) -> Vec<Arc<Record>> {
        let tasks = self.tasks();
        let views = tasks.running.values().map(Handle::lock);
        views.flat_map(|view| view.records.clone()).collect()
    }

    /// Returns the current sandboxes of the pods that are enrolled with ztunnel.
    pub(crate) fn sandboxes_with_ztunnel(&self) -> BTreeSet<SandboxRef> {
        let tasks = self.tasks();
        let sandbox = |handle: &Handle| handle.lock().sandbox_with_ztunnel().cloned();
        tasks.running.values().filter_map(sandbox).collect()
    }

    pub fn sandboxes_of(&self, network: &NetworkName) -> Vec<SandboxRef> {
        let records = self.records().into_iter();
        let of_network = records.filter(|record| record.sandbox.network_name == *network);
        of_network.map(|record| record.sandbox.clone()).collect()
    }

    pub(crate) fn keys(&self) -> Vec<PodKey> {
        let tasks = self.tasks();
        tasks.running.keys().map(|key| PodKey::clone(key)).collect()
    }

    /// Counts views of pods by kind: of the pods with a task, and of the pods of the source whose last ADD was refused.
    pub(crate) fn count<K: Ord>(&self, kind: impl Fn(&View) -> K) -> BTreeMap<K, u64> {
        let inventory = self.shared.source.inventory();
        let tasks = self.tasks();
        let is_refused = |(key, _): &&(Arc<PodKey>, View)| {
            inventory.pod(key).is_some() && !tasks.running.contains_key(key)
        };
        let refused = tasks.failed.iter().filter(is_refused);
        let running = tasks.running.values().map(|handle| kind(&handle.lock()));
        let mut counts = BTreeMap::new();
        for kind in running.chain(refused.map(|(_, view)| kind(view))) {
            *counts.entry(kind).or_default() += 1;
        }
        counts
    }

    /// Returns a pod's view, also for a while after it failed for good.
    pub fn view(&self, key: &PodKey) -> Option<View> {
        let tasks = self.tasks();
        let failed = || {
            tasks
                .failed
                .iter()
                .find(|(known, _)| **known == *key)
                .map(|(_, view)| view.clone())
        };
        tasks.running.get(key).map(Handle::view).or_else(failed)
    }
}
