//! Records in the views of pods that no ztunnel serves them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use inpod_types::{Failure, SandboxRef};

use super::{Handle, Registry};

impl Registry {
    /// Sets or clears the failures of the pods whose current sandbox is among `checked`, and notifies of changes.
    pub(crate) fn set_unserved(
        &self,
        checked: &BTreeSet<SandboxRef>,
        unserved: &BTreeMap<SandboxRef, Arc<Failure>>,
    ) {
        let tasks = self.tasks();
        let changed: Vec<_> = tasks
            .running
            .iter()
            .filter(|(_, handle)| handle.set_unserved(checked, unserved))
            .map(|(key, _)| Arc::clone(key))
            .collect();
        drop(tasks);
        let first = unserved.values().next().filter(|_| !changed.is_empty());
        if let Some(failure) = first {
            let pods = unserved.len();
            tracing::warn!(pods, %failure, "No ztunnel serves pods of the mesh");
        }
        for key in changed {
            self.shared.pod_changes.notify(&key);
        }
    }
}

impl Handle {
    /// Returns whether the failure changed.
    fn set_unserved(
        &self,
        checked: &BTreeSet<SandboxRef>,
        unserved: &BTreeMap<SandboxRef, Arc<Failure>>,
    ) -> bool {
        let mut view = self.lock();
        let Some(sandbox) = view.sandbox_with_ztunnel() else {
            return false;
        };
        let failure = unserved.get(sandbox).cloned();
        if !checked.contains(sandbox) || view.unserved == failure {
            return false;
        }
        let event = match &failure {
            Some(failure) => failure.to_string(),
            None => "served by ztunnel again".to_owned(),
        };
        view.timeline.note(event);
        view.unserved = failure;
        true
    }
}

#[cfg(test)]
mod tests {
    use inpod_types::Reason;

    use super::*;
    use crate::{
        checkpoint::{Intent, Record},
        testing::{enrolled, record, shared},
    };

    fn failure() -> Arc<Failure> {
        Arc::new(Failure::new(Reason::ZtunnelRefused, "AddrInUse"))
    }

    async fn registry(directory: &std::path::Path, intent: Intent) -> (Registry, SandboxRef) {
        let known = Record {
            intent,
            ..record("c1")
        };
        let sandbox = known.sandbox.clone();
        let records = [(sandbox.clone(), known)].into();
        (Registry::new(shared(directory).await, records), sandbox)
    }

    fn shown(registry: &Registry) -> Option<Reason> {
        let view = registry.view(&registry.keys()[0]).unwrap();
        view.current_failure().map(|failure| failure.reason)
    }

    #[tokio::test]
    async fn a_failure_is_shown_until_it_ends_and_each_change_is_notified() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, sandbox) = registry(directory.path(), enrolled()).await;
        let checked = registry.sandboxes_with_ztunnel();
        assert_eq!(checked, [sandbox.clone()].into());
        let mut changes = registry.shared.pod_changes.subscribe();
        let refused = [(sandbox, failure())].into();
        for (unserved, expected, notifies) in [
            (&refused, Some(Reason::ZtunnelRefused), true),
            (&refused, Some(Reason::ZtunnelRefused), false),
            (&BTreeMap::new(), None, true),
        ] {
            registry.set_unserved(&checked, unserved);
            assert_eq!(shown(&registry), expected);
            assert_eq!(changes.try_recv().is_ok(), notifies, "{expected:?}");
        }
    }

    #[tokio::test]
    async fn a_pod_that_was_not_enrolled_at_the_query_keeps_its_state() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, sandbox) = registry(directory.path(), enrolled()).await;
        registry.set_unserved(&BTreeSet::new(), &[(sandbox.clone(), failure())].into());
        assert_eq!(shown(&registry), None);
        let directory = tempfile::tempdir().unwrap();
        let (registry, _) = self::registry(directory.path(), Intent::Out).await;
        assert!(registry.sandboxes_with_ztunnel().is_empty());
        registry.set_unserved(&[sandbox.clone()].into(), &[(sandbox, failure())].into());
        assert_eq!(shown(&registry), None);
    }
}
