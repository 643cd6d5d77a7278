//! A task for each socket, which takes what the kernel tells and has read what that is about.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_types::SandboxRef;
use tokio::task::JoinHandle;

use super::{
    Queue, RETRY_INTERVAL,
    socket::{Received, Socket, UnpolledSocket},
};
use crate::metrics::DriftMetrics;

/// How many messages are taken before others get their turn on the thread.
const MAX_BATCH: usize = 64;

/// Starts a task for each socket.
pub(super) fn start(
    sockets: io::Result<Vec<UnpolledSocket>>,
    receiver: impl Fn() -> NotificationReceiver,
) -> io::Result<Vec<ReceiverTask>> {
    let start_task = |socket: UnpolledSocket| {
        let task = receiver().run(socket.register()?);
        Ok(ReceiverTask(tokio::spawn(inpod_service::vital(
            "receiver", task,
        ))))
    };
    sockets?.into_iter().map(start_task).collect()
}

/// A task that ends, and closes its socket, when this is dropped.
#[derive(Debug)]
pub(super) struct ReceiverTask(JoinHandle<()>);

impl Drop for ReceiverTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Which claimed netns has which nsid. One that is not in it belongs to no claim: the node has other netns, and a
/// nsid lasts longer than the claim that it was given for.
#[derive(Debug, Default)]
pub(super) struct NsidMap(Mutex<BTreeMap<i32, SandboxRef>>);

impl NsidMap {
    pub(super) fn insert(&self, nsid: i32, sandbox: SandboxRef) {
        self.lock().insert(nsid, sandbox);
    }

    /// Unless another claim has it by now.
    pub(super) fn remove(&self, nsid: i32, sandbox: &SandboxRef) {
        let mut nsids = self.lock();
        if nsids.get(&nsid) == Some(sandbox) {
            nsids.remove(&nsid);
        }
    }

    fn get(&self, nsid: i32) -> Option<SandboxRef> {
        self.lock().get(&nsid).cloned()
    }

    /// A panic while it was held cannot have left it half changed: every change is one call of the map.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, SandboxRef>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a socket hears is about.
#[derive(Debug)]
pub(super) enum Scope {
    OneNetns(SandboxRef),
    AllNsids(Arc<NsidMap>),
}

#[derive(Debug)]
pub(super) struct NotificationReceiver {
    pub(super) scope: Scope,
    pub(super) queue: Arc<Queue>,
    pub(super) counts: DriftMetrics,
}

impl NotificationReceiver {
    async fn run(self, socket: Socket) {
        loop {
            if let Err(error) = self.drain(&socket).await {
                // A runtime that ends, or a kernel without memory.
                tracing::error!(%error, "Cannot receive kernel notifications");
                self.mark_scope_changed();
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }

    /// Takes all that is there, and waits for more.
    ///
    /// The kernel tells once that it drops, and goes on dropping until everything was taken (netlink_overrun and
    /// netlink_rcv_wake in net/netlink/af_netlink.c): what is read before that may be read too early, and is read
    /// again. It is read before that as well, because more may come for ever.
    async fn drain(&self, socket: &Socket) -> io::Result<()> {
        let mut has_overrun = false;
        for count in 1_usize.. {
            match socket.receive()? {
                Received::Change(nsid) => self.handle_change(nsid),
                Received::Overrun => {
                    has_overrun = true;
                    self.counts.overrun();
                    self.mark_scope_changed();
                }
                Received::Empty => break,
            }
            if count.is_multiple_of(MAX_BATCH) {
                tokio::task::yield_now().await;
            }
        }
        if has_overrun {
            self.mark_scope_changed();
        }
        socket.ready().await
    }

    fn handle_change(&self, nsid: Option<i32>) {
        let claimed = match &self.scope {
            Scope::OneNetns(sandbox) => Some(sandbox.clone()),
            Scope::AllNsids(nsids) => nsid.and_then(|nsid| nsids.get(nsid)),
        };
        self.counts.event(claimed.is_some());
        if let Some(sandbox) = claimed {
            self.queue.mark_changed(&sandbox);
        }
    }

    fn mark_scope_changed(&self) {
        match &self.scope {
            Scope::OneNetns(sandbox) => self.queue.mark_changed(sandbox),
            Scope::AllNsids(_) => self.queue.mark_all_changed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(name: &str) -> SandboxRef {
        SandboxRef {
            network_name: "net".parse().unwrap(),
            container_id: name.parse().unwrap(),
            ifname: "eth0".parse().unwrap(),
        }
    }

    #[test]
    fn a_number_that_another_claim_got_is_not_freed_with_the_claim_that_had_it() {
        let nsids = NsidMap::default();
        nsids.insert(3, sandbox("old"));
        nsids.insert(3, sandbox("new"));
        nsids.remove(3, &sandbox("old"));
        assert_eq!(nsids.get(3), Some(sandbox("new")));
        nsids.remove(3, &sandbox("new"));
        assert_eq!(nsids.get(3), None);
    }
}
