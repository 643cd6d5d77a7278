//! An index of pods by container: a CNI request names only the sandbox, and the cost of finding the pod must not grow
//! with the number of pods.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_types::{ContainerId, SandboxRef};

use crate::{checkpoint::Record, pod::PodKey};

/// The index by container. The key is not the sandbox, because a record may match requests of another network (see
/// [`Record::matches_request`]), but never of another container.
#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<Pods>);

/// Maps a container to its pods: nearly always a single pod, so a `Vec` takes the least space.
type Pods = BTreeMap<ContainerId, Vec<Arc<PodKey>>>;

impl Owners {
    fn lock(&self) -> MutexGuard<'_, Pods> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn replace(&self, key: &Arc<PodKey>, before: &[Arc<Record>], now: &[Arc<Record>]) {
        let mut owners = self.lock();
        for record in before {
            let container = &record.sandbox.container_id;
            let stays = now
                .iter()
                .any(|record| record.sandbox.container_id == *container);
            if !stays && let Some(pods) = owners.get_mut(container) {
                pods.retain(|known| known != key);
                if pods.is_empty() {
                    owners.remove(container);
                }
            }
        }
        for record in now {
            let container = &record.sandbox.container_id;
            match owners.get_mut(container) {
                Some(pods) if pods.contains(key) => {}
                Some(pods) => pods.push(Arc::clone(key)),
                None => drop(owners.insert(container.clone(), vec![Arc::clone(key)])),
            }
        }
    }

    /// Returns the number of containers.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn candidates(&self, sandbox: &SandboxRef) -> Vec<Arc<PodKey>> {
        let owners = self.lock();
        owners
            .get(&sandbox.container_id)
            .cloned()
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{record, sandbox};

    fn key(name: &str) -> Arc<PodKey> {
        Arc::new(("shop".parse().unwrap(), name.parse().unwrap()))
    }

    #[test]
    fn a_sandbox_belongs_to_the_pod_that_has_it_and_to_none_once_it_is_forgotten() {
        let owners = Owners::default();
        let [a, b] = ["a", "b"].map(|id| Arc::new(record(id)));
        owners.replace(&key("web"), &[], std::slice::from_ref(&a));
        let both = [Arc::clone(&a), b];
        owners.replace(&key("web"), std::slice::from_ref(&a), &both);
        assert_eq!(owners.candidates(&sandbox("a")), [key("web")]);
        assert_eq!(owners.candidates(&sandbox("b")), [key("web")]);
        owners.replace(&key("other"), &[], std::slice::from_ref(&a));
        owners.replace(&key("web"), &both, &[]);
        assert_eq!(owners.candidates(&sandbox("a")), [key("other")]);
        assert_eq!(owners.candidates(&sandbox("b")), []);
        owners.replace(&key("other"), &[a], &[]);
        assert!(owners.lock().is_empty());
    }

    #[test]
    fn a_sandbox_that_is_found_without_its_network_is_of_its_container_too() {
        let owners = Owners::default();
        owners.replace(&key("web"), &[], &[record("a").into()]);
        let mut found = sandbox("a");
        found.network_name = "another".parse().unwrap();
        assert_eq!(owners.candidates(&found), [key("web")]);
    }
}
