//! Notifies subscribers of changed pod views.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::broadcast;

use crate::pod::PodKey;

/// The number of changes that a subscriber may lag behind.
const CHANNEL_CAPACITY: usize = 4096;

/// Broadcasts the keys of pods whose view changed.
#[derive(Debug)]
pub struct PodChanges {
    keys: broadcast::Sender<Arc<PodKey>>,
    count: AtomicU64,
}

impl Default for PodChanges {
    fn default() -> Self {
        Self {
            keys: broadcast::Sender::new(CHANNEL_CAPACITY),
            count: AtomicU64::new(0),
        }
    }
}

impl PodChanges {
    pub fn notify(&self, key: &Arc<PodKey>) {
        self.count.fetch_add(1, Ordering::Relaxed);
        // Sending fails without a subscriber, which is no error.
        self.keys.send(Arc::clone(key)).unwrap_or_default();
    }

    /// Subscribes to later changes. A subscriber that lags has to read all views again.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<PodKey>> {
        self.keys.subscribe()
    }

    /// Returns the number of changes so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_receives_changes_after_it_subscribed() {
        let sender = PodChanges::default();
        let key = |name: &str| Arc::new(("shop".parse().unwrap(), name.parse().unwrap()));
        sender.notify(&key("early"));
        let mut changes = sender.subscribe();
        sender.notify(&key("web"));
        assert_eq!(changes.try_recv().unwrap(), key("web"));
        assert!(changes.try_recv().is_err());
    }
}
