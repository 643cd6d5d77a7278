//! Selects the tasks to wake and to start.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use inpod_types::{Enrollment, NamespaceName};

use super::{Handle, Registry};
use crate::{
    pod::PodKey,
    tasks::task::{Command, should_be_enrolled},
};

impl Registry {
    pub(crate) fn wake(&self, selects: impl Fn(&PodKey) -> bool) {
        for (_, handle) in self.tasks().running.iter().filter(|(key, _)| selects(key)) {
            handle.send(Command::Reconcile);
        }
    }

    /// Starts tasks for the selected pods that have no record and are to be in the mesh, once the pods that ran before
    /// inpod are recorded. Pods with a sidecar do not wait, because they do not matter to ztunnel and need netconfig
    /// alone.
    pub(crate) fn discover(&self, selects: impl Fn(&PodKey) -> bool) {
        let all = self.adopted.load(Ordering::Relaxed);
        let claims = self.shared.pipeline.broker_for(Enrollment::Sidecar).is_ok();
        if !all && !claims {
            return;
        }
        let inventory = self.shared.source.inventory();
        for (key, pod) in inventory.pods.iter().filter(|(key, _)| selects(key)) {
            let is_known = self.tasks().running.contains_key(key);
            if !is_known && should_be_enrolled(&self.shared, pod, all) {
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
    fn is_managed(&self) -> bool {
        self.lock().records.iter().any(|record| record.is_managed())
    }
}
