//! Tasks that receive notifications, one per socket.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_types::SandboxRef;
use tokio::task::JoinHandle;

use super::{
    RETRY_INTERVAL,
    socket::{Received, Socket, UnpolledSocket},
};
use crate::notifications::DriftMetrics;
use crate::read_queue::Queue;

/// Messages after which a task yields.
const MAX_BATCH: usize = 64;

pub(super) fn start(
    sockets: io::Result<Vec<UnpolledSocket>>,
    receiver: impl Fn() -> NotificationReceiver,
) -> io::Result<Vec<ReceiverTask>> {
    let start_task = |socket: UnpolledSocket| {
        let task = receiver().run(socket.register()?);
        Ok(ReceiverTask(tokio::spawn(inpod_service::abort_on_panic(
            "receiver", task,
        ))))
    };
    sockets?.into_iter().map(start_task).collect()
}

/// A task that is aborted on drop, which closes the socket.
#[derive(Debug)]
pub(super) struct ReceiverTask(JoinHandle<()>);

impl Drop for ReceiverTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Nsids of claimed netns only: the node has other netns, and an nsid outlives its claim.
#[derive(Debug, Default)]
pub(super) struct NsidMap(Mutex<BTreeMap<i32, SandboxRef>>);

impl NsidMap {
    pub(super) fn insert(&self, nsid: i32, sandbox: SandboxRef) {
        self.lock().insert(nsid, sandbox);
    }

    /// Keeps it if another claim has it by now.
    pub(super) fn remove(&self, nsid: i32, sandbox: &SandboxRef) {
        let mut nsids = self.lock();
        if nsids.get(&nsid) == Some(sandbox) {
            nsids.remove(&nsid);
        }
    }

    fn get(&self, nsid: i32) -> Option<SandboxRef> {
        self.lock().get(&nsid).cloned()
    }

    /// Poisoning is harmless: every change is a single call of the map.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, SandboxRef>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
                // The runtime is shutting down, or the kernel is out of memory.
                tracing::error!(%error, "Cannot receive kernel notifications");
                self.mark_scope_changed();
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }

    /// Receives all pending notifications, then waits for more.
    ///
    /// The kernel reports once that it drops, and drops until the socket is empty (netlink_overrun and
    /// netlink_rcv_wake in net/netlink/af_netlink.c). A read before that may be too early: everything is marked again
    /// at the end. It is marked at the report, too, since the socket may never become empty.
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
