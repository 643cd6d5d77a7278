//! Selects the tasks to wake. The cost of a change depends only on the affected pods.

use std::{collections::BTreeSet, ops::Bound, sync::atomic::Ordering};

use inpod_types::{Enrollment, NamespaceName, PodName};

use super::{Handle, Registry, Tasks};
use crate::{
    inventory::Changes,
    pod::PodKey,
    task::{Command, should_be_enrolled},
};

/// A name that sorts before all names, because names begin with a lower-case letter or a digit (RFC 1123, as Kubernetes
/// requires).
const FIRST_NAME: &str = "0";

impl Tasks {
    fn of_namespace(&self, namespace: &NamespaceName) -> impl Iterator<Item = &Handle> {
        let first = FIRST_NAME.parse::<PodName>().ok();
        let first = first.map(|first| (namespace.clone(), first));
        let from = |first| {
            self.running
                .range((Bound::Included(first), Bound::Unbounded))
        };
        let found = first.map(from).into_iter().flatten();
        found
            .take_while(move |(key, _)| key.0 == *namespace)
            .map(|(_, handle)| handle)
    }
}

impl Registry {
    /// Wakes the tasks of changed pods and of pods in changed namespaces; wakes all tasks if the source's completeness
    /// changed.
    pub(crate) fn wake_changed(&self, changes: &Changes) {
        if changes.completeness {
            return self.wake(|_| true);
        }
        let tasks = self.tasks();
        let alone = |key: &&PodKey| !changes.namespaces.contains(&key.0);
        let pods = changes.pods.iter().filter(alone);
        let pods = pods.filter_map(|key| tasks.running.get(key));
        let namespaces = changes.namespaces.iter();
        let namespaces = namespaces.flat_map(|namespace| tasks.of_namespace(namespace));
        for handle in pods.chain(namespaces) {
            handle.send(Command::Reconcile);
        }
    }

    /// Starts a task for every pod without a record that is to be in the mesh.
    pub(crate) fn discover_all(&self) {
        let inventory = self.shared.source.inventory();
        self.discover(inventory.pods.iter().map(|(key, _)| key));
    }

    /// Starts the tasks for changed pods and for pods in changed namespaces.
    pub(crate) fn discover_changed(&self, changes: &Changes) {
        if changes.completeness || !changes.namespaces.is_empty() {
            self.discover_all();
        } else {
            self.discover(changes.pods.iter());
        }
    }

    /// Starts tasks for the given pods once the pods that ran before inpod are recorded. Pods with a sidecar do not
    /// wait, because they do not matter to ztunnel and need netconfig alone.
    fn discover<'a>(&self, pods: impl Iterator<Item = &'a PodKey>) {
        let all = self.adopted.load(Ordering::Relaxed);
        let claims = self.shared.pipeline.broker_for(Enrollment::Sidecar).is_ok();
        if !all && !claims {
            return;
        }
        let inventory = self.shared.source.inventory();
        for key in pods {
            let is_known = self.tasks().running.contains_key(key);
            let pod = inventory.pod(key).filter(|_| !is_known);
            if pod.is_some_and(|pod| should_be_enrolled(&self.shared, pod, all)) {
                self.dispatch(key, Command::Reconcile);
            }
        }
    }

    pub(crate) fn wake_pods(&self, pods: &BTreeSet<PodKey>) {
        let tasks = self.tasks();
        for handle in pods.iter().filter_map(|key| tasks.running.get(key)) {
            handle.send(Command::Reconcile);
        }
    }

    /// Returns the namespaces with a pod in the mesh, or on its way in or out.
    pub(crate) fn namespaces_with_managed_pods(&self) -> BTreeSet<NamespaceName> {
        let tasks = self.tasks();
        let held = tasks
            .running
            .iter()
            .filter(|(_, handle)| handle.is_managed());
        held.map(|(key, _)| key.0.clone()).collect()
    }

    pub(crate) fn has_managed_pods(&self, namespace: &NamespaceName) -> bool {
        self.tasks().of_namespace(namespace).any(Handle::is_managed)
    }
}

impl Handle {
    fn is_managed(&self) -> bool {
        self.lock().records.iter().any(|record| record.is_managed())
    }
}
