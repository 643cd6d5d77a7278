//! Selects the tasks to wake and to start.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use inpod_types::{Enrollment, NamespaceName};

use super::{Handle, Registry};
use crate::{
    inventory::Changes,
    pod::{Pod, PodKey},
    tasks::task::{Command, should_be_enrolled},
};

impl Registry {
    pub(crate) fn wake(&self, pods: &BTreeSet<PodKey>) {
        let tasks = self.tasks();
        let of_pods = pods.iter().filter_map(|key| tasks.running.get(key));
        of_pods.for_each(Handle::wake);
    }

    /// Wakes the tasks of the affected pods, also of pods that the inventory does not have, and starts tasks for
    /// affected pods that have no record and are to be in the mesh.
    pub(crate) fn evaluate(&self, changes: &Changes) {
        let inventory = self.shared.source.inventory();
        if changes.are_of_pods_only() {
            self.wake(&changes.pods);
            let pods = changes.pods.iter();
            return self.discover(pods.filter_map(|key| Some((key, inventory.pod(key)?))));
        }
        let tasks = self.tasks();
        let running = tasks.running.iter();
        let affected = running.filter(|(key, _)| changes.affects(key));
        affected.for_each(|(_, handle)| handle.wake());
        drop(tasks);
        let pods = inventory.pods.iter();
        self.discover(pods.filter(|(key, _)| changes.affects(key)));
    }

    /// Does nothing until the pods that ran before inpod are recorded. Pods with a sidecar do not wait, because they do
    /// not matter to ztunnel and need netconfig alone.
    fn discover<'a>(&self, pods: impl Iterator<Item = (&'a PodKey, &'a Pod)>) {
        let all = self.adopted.load(Ordering::Relaxed);
        let claims = self.shared.pipeline.broker_for(Enrollment::Sidecar).is_ok();
        if !all && !claims {
            return;
        }
        for (key, pod) in pods {
            let has_task = self.tasks().running.contains_key(key);
            if !has_task && should_be_enrolled(&self.shared, pod, all) {
                self.dispatch(key, Command::Reconcile);
            }
        }
    }

    /// Returns the namespaces with a pod in the mesh, or on its way in or out.
    pub(crate) fn namespaces_with_managed_pods(&self) -> BTreeSet<NamespaceName> {
        let mut namespaces = BTreeSet::new();
        for (key, handle) in &self.tasks().running {
            if !namespaces.contains(&key.0) && handle.is_managed() {
                namespaces.insert(key.0.clone());
            }
        }
        namespaces
    }
}

impl Handle {
    fn wake(&self) {
        self.send(Command::Reconcile);
    }

    fn is_managed(&self) -> bool {
        self.lock().records.iter().any(|record| record.is_managed())
    }
}
