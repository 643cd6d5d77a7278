//! Opens the sockets that receive notifications of each claimed netns.
//!
//! Two shared sockets receive the notifications of all claimed netns, with their nsid. They are in a netns of their
//! own, because sockets in the node's netns would receive every change that others make on the node. Where the kernel
//! refuses shared sockets (they need CAP_NET_BROADCAST), netconfig opens two sockets in each claimed netns. Like the claim, sockets in a netns keep the netns alive (services/docs/facts/kernel.md, 7), and are
//! closed with the claim.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_linux::Netns;
use inpod_types::{NetnsId, SandboxRef, with_causes};

use super::{
    nsid::NsidAssigner,
    receiver::{NotificationReceiver, NsidMap, ReceiverTask, Scope, start},
    socket::{Topic, UnpolledSocket},
};
use crate::{claims::Claim, netlink::KernelError, notifications::DriftMetrics, read_queue::Queue};

/// The maximum buffer size of a socket in a claimed netns. Each claimed netns has two such sockets, which receive
/// its notifications only.
const OWN_BUFFER_BYTES: usize = 256 * 1024;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// `true` shares sockets between netns; `false` opens sockets in each netns, as if the kernel had refused.
    pub(crate) shared: bool,
    /// The buffer size of a shared socket (SO_RCVBUF; the kernel doubles the size, and counts its overhead).
    pub(crate) buffer_bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Subscriptions {
    options: Options,
    queue: Arc<Queue>,
    counts: DriftMetrics,
    shared: Result<Shared, String>,
    open: Mutex<BTreeMap<SandboxRef, Subscription>>,
}

/// The shared sockets, with the nsids of claimed netns in the sockets' netns.
#[derive(Debug)]
struct Shared {
    assigner: Mutex<NsidAssigner>,
    nsids: Arc<NsidMap>,
    _tasks: Vec<ReceiverTask>,
}

#[derive(Debug)]
struct Subscription {
    netns: NetnsId,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Shared(i32),
    Own { _tasks: Vec<ReceiverTask> },
}

impl Subscriptions {
    /// Opens the shared sockets. Must be called within a runtime.
    pub(crate) fn open(options: Options, queue: Arc<Queue>, counts: DriftMetrics) -> Self {
        let shared = if options.shared {
            Shared::open(options.buffer_bytes, &queue, &counts)
        } else {
            Err("switched off".to_owned())
        };
        Self {
            options,
            queue,
            counts,
            shared,
            open: Mutex::default(),
        }
    }

    /// Returns the reason for separate sockets as the error.
    pub(crate) fn are_shared(&self) -> Result<(), String> {
        match &self.shared {
            Ok(_) => Ok(()),
            Err(why) => Err(format!(
                "using sockets in each claimed netns instead of shared ones, which need CAP_NET_BROADCAST: {why}"
            )),
        }
    }

    /// Subscribes to a claim's netns, or keeps an existing subscription, and returns whether the netns is
    /// subscribed. May block, and must be called within a runtime.
    pub(crate) fn subscribe(&self, claim: &Claim) -> bool {
        let netns = claim.netns.id();
        let mut open = self.lock();
        let known = open.get(&claim.sandbox);
        if known.is_some_and(|subscription| subscription.netns == netns) {
            return true;
        }
        // The old subscription is closed first, because the kernel may assign the old netns's nsid to the new
        // netns.
        if let Some(before) = open.remove(&claim.sandbox) {
            self.close(&claim.sandbox, &before.source);
        }
        let Some(source) = self.open_source(claim) else {
            return false;
        };
        open.insert(claim.sandbox.clone(), Subscription { netns, source });
        true
    }

    pub(crate) fn unsubscribe(&self, sandbox: &SandboxRef, netns: NetnsId) {
        let mut open = self.lock();
        if open
            .get(sandbox)
            .is_some_and(|subscription| subscription.netns == netns)
            && let Some(subscription) = open.remove(sandbox)
        {
            self.close(sandbox, &subscription.source);
        }
    }

    /// Locks the subscriptions, for which poisoning is harmless because an unrecorded subscription is made again.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxRef, Subscription>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self, sandbox: &SandboxRef, source: &Source) {
        if let (Source::Shared(nsid), Ok(shared)) = (source, &self.shared) {
            shared.nsids.remove(*nsid, sandbox);
        }
    }

    fn open_source(&self, claim: &Claim) -> Option<Source> {
        if let Ok(shared) = &self.shared {
            match shared.nsid_of(&claim.netns) {
                Ok(nsid) => {
                    shared.nsids.insert(nsid, claim.sandbox.clone());
                    return Some(Source::Shared(nsid));
                }
                Err(error) => {
                    let error = with_causes(&error);
                    tracing::warn!(sandbox = %claim.sandbox, error, "Cannot get an nsid for the netns; opening sockets in it");
                }
            }
        }
        match self.open_own_sockets(claim) {
            Ok(_tasks) => Some(Source::Own { _tasks }),
            Err(error) => {
                tracing::warn!(sandbox = %claim.sandbox, error, "Cannot subscribe to changes of the netns; relying on periodic reads");
                None
            }
        }
    }

    fn open_own_sockets(&self, claim: &Claim) -> Result<Vec<ReceiverTask>, String> {
        let buffer_bytes = self.options.buffer_bytes.min(OWN_BUFFER_BYTES);
        let open_sockets = claim.netns.within(|| open_sockets(buffer_bytes, false));
        let open_sockets = open_sockets.map_err(|error| with_causes(&error))?;
        let receiver = || NotificationReceiver {
            scope: Scope::OneNetns(claim.sandbox.clone()),
            queue: Arc::clone(&self.queue),
            counts: self.counts.clone(),
        };
        start(open_sockets, receiver).map_err(|error| error.to_string())
    }
}

impl Shared {
    fn open(
        buffer_bytes: usize,
        queue: &Arc<Queue>,
        counts: &DriftMetrics,
    ) -> Result<Self, String> {
        let netns = Netns::create().map_err(|error| with_causes(&error))?;
        let opened =
            netns.within(|| Ok((NsidAssigner::open()?, open_sockets(buffer_bytes, true)?)));
        let opened = opened.map_err(|error| with_causes(&error))?;
        let (assigner, sockets) = opened.map_err(|error: io::Error| error.to_string())?;
        let nsids = Arc::<NsidMap>::default();
        let receiver = || NotificationReceiver {
            scope: Scope::AllNsids(Arc::clone(&nsids)),
            queue: Arc::clone(queue),
            counts: counts.clone(),
        };
        let tasks = start(Ok(sockets), receiver).map_err(|error| error.to_string())?;
        Ok(Self {
            assigner: Mutex::new(assigner),
            nsids,
            _tasks: tasks,
        })
    }

    fn nsid_of(&self, netns: &Netns) -> Result<i32, KernelError> {
        let assigner = self.assigner.lock();
        assigner
            .unwrap_or_else(PoisonError::into_inner)
            .nsid_of(netns)
    }
}

/// Opens one socket per topic.
fn open_sockets(buffer_bytes: usize, all_nsids: bool) -> io::Result<Vec<UnpolledSocket>> {
    let open = |topic| UnpolledSocket::open(topic, buffer_bytes, all_nsids);
    Topic::ALL.into_iter().map(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shared_sockets_that_are_masked_are_not_used_and_it_is_said_why() {
        let options = Options {
            shared: false,
            buffer_bytes: 4096,
        };
        let queue = Arc::new(Queue::new(std::time::Duration::from_secs(1)));
        let ears = Subscriptions::open(options, queue, DriftMetrics::default());
        let why = ears.are_shared().unwrap_err();
        assert!(why.ends_with("switched off"), "{why}");
    }
}
