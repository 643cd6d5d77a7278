//! Receives notifications of each claimed netns.
//!
//! Two sockets receive the notifications of all claimed netns, with their nsid. The sockets are in a netns of their
//! own, because in the node's netns they would receive every change that others make on the node.

use std::{collections::BTreeMap, io, sync::Arc};

use inpod_linux::{CreateError, EnterError, Netns};
use inpod_types::{NetnsId, SandboxRef, with_causes};
use parking_lot::Mutex;

use super::{
    nsid::NsidAssigner,
    receiver::{NotificationReceiver, NsidMap, ReceiverTask, start},
    socket::{Topic, UnpolledSocket},
};
use crate::{claims::Claim, notifications::DriftMetrics, read_queue::Queue};

#[derive(Debug, thiserror::Error)]
pub(crate) enum SubscribeError {
    #[error("cannot create a netns")]
    Create(#[from] CreateError),
    #[error("cannot enter a netns")]
    Enter(#[from] EnterError),
    #[error("cannot open sockets for notifications of all netns, which takes NET_BROADCAST")]
    Open(#[from] io::Error),
}

#[derive(Debug)]
pub(crate) struct Subscriptions {
    assigner: Mutex<NsidAssigner>,
    nsids: Arc<NsidMap>,
    open: Mutex<BTreeMap<SandboxRef, Subscription>>,
    _tasks: Vec<ReceiverTask>,
}

#[derive(Debug)]
struct Subscription {
    netns: NetnsId,
    /// The nsid of the netns in the sockets' netns.
    nsid: i32,
}

impl Subscriptions {
    /// Opens the sockets with a buffer of this size (SO_RCVBUF; the kernel doubles the size, and counts its overhead).
    /// Must be called within a runtime.
    pub(crate) fn open(
        buffer_bytes: usize,
        queue: &Arc<Queue>,
        counts: &DriftMetrics,
    ) -> Result<Self, SubscribeError> {
        let open_all = || {
            let open = |topic| UnpolledSocket::open(topic, buffer_bytes);
            let sockets = Topic::ALL.into_iter().map(open);
            Ok::<_, io::Error>((NsidAssigner::open()?, sockets.collect::<io::Result<_>>()?))
        };
        let (assigner, sockets) = Netns::create()?.within(open_all)??;
        let nsids = Arc::<NsidMap>::default();
        let receiver = || NotificationReceiver {
            nsids: Arc::clone(&nsids),
            queue: Arc::clone(queue),
            counts: counts.clone(),
        };
        let tasks = start(sockets, receiver)?;
        Ok(Self {
            assigner: Mutex::new(assigner),
            nsids,
            open: Mutex::default(),
            _tasks: tasks,
        })
    }

    /// Subscribes to a claim's netns, or keeps an existing subscription, and returns whether the netns is
    /// subscribed.
    pub(crate) fn subscribe(&self, claim: &Claim) -> bool {
        let netns = claim.netns.id();
        let mut open = self.open.lock();
        let known = open.get(&claim.sandbox);
        if known.is_some_and(|subscription| subscription.netns == netns) {
            return true;
        }
        // The old subscription is closed first, because the kernel may assign the old netns's nsid to the new
        // netns.
        if let Some(before) = open.remove(&claim.sandbox) {
            self.nsids.remove(before.nsid, &claim.sandbox);
        }
        match self.assigner.lock().nsid_of(&claim.netns) {
            Ok(nsid) => {
                self.nsids.insert(nsid, claim.sandbox.clone(), netns);
                open.insert(claim.sandbox.clone(), Subscription { netns, nsid });
                true
            }
            Err(error) => {
                let error = with_causes(&error);
                tracing::warn!(sandbox = %claim.sandbox, error, "Cannot subscribe to changes of the netns; relying on periodic reads");
                false
            }
        }
    }

    pub(crate) fn unsubscribe(&self, sandbox: &SandboxRef, netns: NetnsId) {
        let mut open = self.open.lock();
        if open
            .get(sandbox)
            .is_some_and(|subscription| subscription.netns == netns)
            && let Some(subscription) = open.remove(sandbox)
        {
            self.nsids.remove(subscription.nsid, sandbox);
        }
    }
}
