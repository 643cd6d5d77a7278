//! Notifies subscribers of changed pod views.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::pod::PodKey;

/// The number of changes that a subscriber may lag behind.
const CHANNEL_CAPACITY: usize = 4096;

/// Broadcasts the keys of pods whose view changed.
#[derive(Debug)]
pub struct PodChanges(broadcast::Sender<Arc<PodKey>>);

impl Default for PodChanges {
    fn default() -> Self {
        Self(broadcast::Sender::new(CHANNEL_CAPACITY))
    }
}

impl PodChanges {
    pub fn notify(&self, key: &Arc<PodKey>) {
        // Sending fails without a subscriber, which is no error.
        self.0.send(Arc::clone(key)).unwrap_or_default();
    }

    /// Subscribes to later changes. A subscriber that lags has to read all views again.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<PodKey>> {
        self.0.subscribe()
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
