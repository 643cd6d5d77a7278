//! Waiting callers of adds.

use std::collections::BTreeMap;

use inpod_types::PodUid;
use tokio::sync::watch;

/// Wakes callers by pod, so that a change of one pod does not wake all callers. A woken caller decides anew (see
/// [`crate::outcome`]).
#[derive(Debug, Default)]
pub struct Waits(BTreeMap<PodUid, watch::Sender<()>>);

impl Waits {
    pub fn subscribe(&mut self, uid: &PodUid) -> watch::Receiver<()> {
        self.0.entry(uid.clone()).or_default().subscribe()
    }

    /// Returns whether a caller waits for the pod.
    pub fn contains(&self, uid: &PodUid) -> bool {
        let waits = self.0.get(uid);
        waits.is_some_and(|callers| callers.receiver_count() > 0)
    }

    pub fn wake(&mut self, uid: &PodUid) {
        // Without callers, nothing is sent.
        if self.0.get(uid).is_some_and(|it| it.send(()).is_err()) {
            self.0.remove(uid);
        }
    }

    pub fn wake_all(&mut self) {
        self.0.retain(|_, callers| callers.send(()).is_ok());
    }
}
