//! Runs the tasks receiving notifications, one task per socket.

use std::{collections::BTreeMap, io, sync::Arc};

use inpod_types::{NetnsId, SandboxRef};
use nix::sys::socket::SockProtocol;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::{
    RETRY_INTERVAL,
    socket::{Received, Socket, UnpolledSocket},
};
use crate::{netlink::own, notifications::DriftMetrics, read_queue::Queue};

/// The number of messages after which a task yields.
const MAX_BATCH: usize = 64;

pub(super) fn start(
    sockets: Vec<UnpolledSocket>,
    receiver: impl Fn() -> NotificationReceiver,
) -> io::Result<Vec<ReceiverTask>> {
    let start_task = |socket: UnpolledSocket| {
        let task = receiver().run(socket.register()?);
        Ok(ReceiverTask(tokio::spawn(inpod_service::abort_on_panic(
            "receiver", task,
        ))))
    };
    sockets.into_iter().map(start_task).collect()
}

/// A task aborted on drop, which closes the socket.
#[derive(Debug)]
pub(super) struct ReceiverTask(JoinHandle<()>);

impl Drop for ReceiverTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Maps nsids to claims, and contains only nsids of claimed netns, because the node has other netns, and an nsid
/// outlives its claim.
#[derive(Debug, Default)]
pub(super) struct NsidMap(Mutex<BTreeMap<i32, (SandboxRef, NetnsId)>>);

impl NsidMap {
    pub(super) fn insert(&self, nsid: i32, sandbox: SandboxRef, netns: NetnsId) {
        self.0.lock().insert(nsid, (sandbox, netns));
    }

    /// Removes an nsid, unless the nsid belongs to another claim by now.
    pub(super) fn remove(&self, nsid: i32, sandbox: &SandboxRef) {
        let mut nsids = self.0.lock();
        if nsids.get(&nsid).is_some_and(|(of, _)| of == sandbox) {
            nsids.remove(&nsid);
        }
    }

    fn get(&self, nsid: i32) -> Option<(SandboxRef, NetnsId)> {
        self.0.lock().get(&nsid).cloned()
    }
}

#[derive(Debug)]
pub(super) struct NotificationReceiver {
    pub(super) nsids: Arc<NsidMap>,
    pub(super) queue: Arc<Queue>,
    pub(super) counts: DriftMetrics,
}

impl NotificationReceiver {
    async fn run(self, socket: Socket) {
        loop {
            if let Err(error) = self.drain(&socket).await {
                // The runtime is shutting down, or the kernel is out of memory.
                tracing::error!(%error, "Cannot receive kernel notifications");
                self.queue.mark_all_changed();
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }

    /// Receives all pending notifications, then waits for more.
    ///
    /// After an overrun, the kernel reports the loss once, and drops notifications until the socket is empty
    /// (netlink_overrun and netlink_rcv_wake in net/netlink/af_netlink.c). A read before the socket is empty may be
    /// too early, so everything is marked as changed again at the end. Everything is also marked at the report,
    /// since the socket may never become empty.
    async fn drain(&self, socket: &Socket) -> io::Result<()> {
        let mut has_overrun = false;
        for count in 1_usize.. {
            match socket.receive()? {
                Received::Change(number, nsid) => {
                    self.handle_change(socket.protocol(), number, nsid);
                }
                Received::Overrun => {
                    has_overrun = true;
                    self.counts.overrun();
                    self.queue.mark_all_changed();
                }
                Received::Empty => break,
            }
            if count.is_multiple_of(MAX_BATCH) {
                tokio::task::yield_now().await;
            }
        }
        if has_overrun {
            self.queue.mark_all_changed();
        }
        socket.ready().await
    }

    fn handle_change(&self, protocol: SockProtocol, number: u32, nsid: Option<i32>) {
        let claimed = nsid.and_then(|nsid| self.nsids.get(nsid));
        if let Some((_, netns)) = claimed
            && own::take(own::Source { netns, protocol }, number)
        {
            return;
        }
        self.counts.event(claimed.is_some());
        if let Some((sandbox, _)) = claimed {
            self.queue.mark_changed(&sandbox);
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
        let netns = |inode| NetnsId {
            device: 4,
            inode,
            cookie: inode,
        };
        nsids.insert(3, sandbox("old"), netns(1));
        nsids.insert(3, sandbox("new"), netns(2));
        nsids.remove(3, &sandbox("old"));
        assert_eq!(nsids.get(3), Some((sandbox("new"), netns(2))));
        nsids.remove(3, &sandbox("new"));
        assert_eq!(nsids.get(3), None);
    }
}
