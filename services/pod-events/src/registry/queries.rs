use std::{collections::BTreeMap, sync::Arc};

use inpod_types::{NetworkName, SandboxRef};

use super::{Handle, Registry};
use crate::{checkpoint::Record, pod::PodKey, task::View};

impl Registry {
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

    pub fn sandboxes_of(&self, network: &NetworkName) -> Vec<SandboxRef> {
        let records = self.records().into_iter();
        let of_network = records.filter(|record| record.sandbox.network_name == *network);
        of_network.map(|record| record.sandbox.clone()).collect()
    }

    pub(crate) fn keys(&self) -> Vec<PodKey> {
        let tasks = self.tasks();
        tasks.running.keys().map(|key| PodKey::clone(key)).collect()
    }

    pub(crate) fn count<K: Ord>(&self, kind: impl Fn(&View) -> K) -> BTreeMap<K, u64> {
        let mut counts = BTreeMap::new();
        for handle in self.tasks().running.values() {
            *counts.entry(kind(&handle.lock())).or_default() += 1;
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
