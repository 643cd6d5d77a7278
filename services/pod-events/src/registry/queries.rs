use std::{collections::BTreeMap, sync::PoisonError};

use inpod_types::{NetworkName, SandboxRef};

use super::{Handle, Registry};
use crate::{checkpoint::Record, source::PodKey, task::View};

impl Registry {
    pub(crate) fn owner(&self, sandbox: &SandboxRef) -> Option<PodKey> {
        let tasks = self.tasks();
        let holds = |handle: &Handle| {
            let view = handle.view.lock().unwrap_or_else(PoisonError::into_inner);
            view.records
                .iter()
                .any(|record| record.matches_request(sandbox))
        };
        let mut pods = self.shared.owners.candidates(sandbox).into_iter();
        pods.find(|key| tasks.running.get(key).is_some_and(holds))
    }

    pub fn record(&self, sandbox: &SandboxRef) -> Option<Record> {
        let view = self.view(&self.owner(sandbox)?)?;
        let mut records = view.records.into_iter();
        records.find(|record| record.matches_request(sandbox))
    }

    pub fn records(&self) -> Vec<Record> {
        self.views()
            .into_values()
            .flat_map(|view| view.records)
            .collect()
    }

    pub fn sandboxes_of(&self, network: &NetworkName) -> Vec<SandboxRef> {
        let sandboxes = self.records().into_iter().map(|record| record.sandbox);
        sandboxes
            .filter(|sandbox| sandbox.network_name == *network)
            .collect()
    }

    pub fn views(&self) -> BTreeMap<PodKey, View> {
        self.tasks()
            .running
            .iter()
            .map(|(key, handle)| (key.clone(), handle.view()))
            .collect()
    }

    pub(crate) fn keys(&self) -> Vec<PodKey> {
        self.tasks().running.keys().cloned().collect()
    }

    pub(crate) fn count<K: Ord>(&self, kind: impl Fn(&View) -> K) -> BTreeMap<K, u64> {
        let mut counts = BTreeMap::new();
        for handle in self.tasks().running.values() {
            let view = handle.view.lock().unwrap_or_else(PoisonError::into_inner);
            *counts.entry(kind(&view)).or_default() += 1;
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
                .find(|(known, _)| known == key)
                .map(|(_, view)| view.clone())
        };
        tasks.running.get(key).map(Handle::view).or_else(failed)
    }
}
