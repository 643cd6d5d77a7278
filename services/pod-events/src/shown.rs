//! Who hears that something else is to be seen of a pod.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::source::PodKey;

/// How many changes a listener may be behind before it has to read everything again.
const BEHIND: usize = 4096;

/// Tells which pods' views changed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shown(broadcast::Sender<Arc<PodKey>>);

impl Default for Shown {
    fn default() -> Self {
        Self(broadcast::Sender::new(BEHIND))
    }
}

impl Shown {
    /// A pod's view changed.
    pub fn tell(&self, key: &PodKey) {
        // Without a listener nobody need hear.
        self.0.send(Arc::new(key.clone())).unwrap_or_default();
    }

    /// The pods whose view changes from now on. One that lags has to read all views again.
    pub fn changes(&self) -> broadcast::Receiver<Arc<PodKey>> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_hears_of_what_changes_after_it_began_to_listen() {
        let shown = Shown::default();
        let key = |name: &str| ("shop".parse().unwrap(), name.parse().unwrap());
        shown.tell(&key("early"));
        let mut changes = shown.changes();
        shown.tell(&key("web"));
        assert_eq!(*changes.try_recv().unwrap(), key("web"));
        assert!(changes.try_recv().is_err());
    }
}
