//! The pods of the node, and what each request of the agent does to them.
//!
//! Nothing in here starts or stops anything: a method says what has to be started, and hands out
//! what has to be stopped.

use std::collections::{BTreeMap, BTreeSet};

use zds_client::WorkloadInfo;

use crate::enter::{Netns, NetnsId};
use crate::state_file::{Phase, PodState};

/// A pod that the agent asked for.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) uid: String,
    pub(crate) info: WorkloadInfo,
    pub(crate) netns: Netns,
}

/// What an Add asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission<P> {
    /// Nothing: the pod runs in this netns already. Its info stays as it was.
    Running,
    /// Start the pod, after the proxy of its former netns is stopped.
    Start { replaced: Option<P> },
}

/// The pods, each with its proxy `P` while it runs.
#[derive(Debug)]
pub(crate) struct Pods<P> {
    running: BTreeMap<String, Running<P>>,
    pending: BTreeMap<String, Workload>,
    /// The UIDs that this connection named before its snapshot was complete.
    named: BTreeSet<String>,
    snapshot_complete: bool,
}

#[derive(Debug)]
struct Running<P> {
    info: WorkloadInfo,
    netns: NetnsId,
    proxy: P,
}

impl<P> Pods<P> {
    pub(crate) const fn new() -> Self {
        Self {
            running: BTreeMap::new(),
            pending: BTreeMap::new(),
            named: BTreeSet::new(),
            snapshot_complete: false,
        }
    }

    /// A new connection: pods run on, all else starts over.
    pub(crate) fn reconnected(&mut self) {
        self.pending.clear();
        self.named.clear();
        self.snapshot_complete = false;
    }

    /// An Add. To be followed by [`Self::started`] or [`Self::failed`] if it says so.
    pub(crate) fn add(&mut self, workload: &Workload) -> Admission<P> {
        self.name(&workload.uid);
        if self.runs(workload) {
            return Admission::Running;
        }
        let replaced = self.running.remove(&workload.uid);
        let replaced = replaced.map(|running| running.proxy);
        Admission::Start { replaced }
    }

    fn runs(&self, workload: &Workload) -> bool {
        self.running
            .get(&workload.uid)
            .is_some_and(|running| running.netns == workload.netns.id())
    }

    fn name(&mut self, uid: &str) {
        if !self.snapshot_complete {
            self.named.insert(uid.to_owned());
        }
    }

    /// The pod's listeners are open.
    pub(crate) fn started(&mut self, workload: Workload, proxy: P) {
        self.pending.remove(&workload.uid);
        let running = Running {
            info: workload.info,
            netns: workload.netns.id(),
            proxy,
        };
        self.running.insert(workload.uid, running);
    }

    /// The pod's listeners could not be opened: it is tried again.
    pub(crate) fn failed(&mut self, workload: Workload) {
        self.pending.insert(workload.uid.clone(), workload);
    }

    /// A Keep. One of an unknown pod does nothing.
    pub(crate) fn keep(&mut self, uid: &str) {
        self.name(uid);
    }

    /// A Del: the proxy to stop now. Before the snapshot is complete there is none, since only
    /// then it is known what stays.
    pub(crate) fn del(&mut self, uid: &str) -> Option<P> {
        self.pending.remove(uid);
        self.named.remove(uid);
        if !self.snapshot_complete {
            return None;
        }
        self.running.remove(uid).map(|running| running.proxy)
    }

    /// A SnapshotSent: the proxies to stop.
    pub(crate) fn complete_snapshot(&mut self) -> Vec<P> {
        self.snapshot_complete = true;
        let named = std::mem::take(&mut self.named);
        let unnamed = self.running.extract_if(.., |uid, _| !named.contains(uid));
        unnamed.map(|(_, running)| running.proxy).collect()
    }

    /// The end: every proxy.
    pub(crate) fn take(&mut self) -> Vec<P> {
        let running = std::mem::take(&mut self.running);
        running.into_values().map(|running| running.proxy).collect()
    }

    /// The pods that want another try.
    pub(crate) fn pending(&self) -> Vec<Workload> {
        self.pending.values().cloned().collect()
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(crate) const fn snapshot_complete(&self) -> bool {
        self.snapshot_complete
    }

    /// Every pod, by UID.
    pub(crate) fn states(&self) -> Vec<PodState> {
        let running = self
            .running
            .iter()
            .map(|(uid, pod)| state(uid, &pod.info, pod.netns, Phase::Running));
        let pending = self
            .pending
            .iter()
            .map(|(uid, pod)| state(uid, &pod.info, pod.netns.id(), Phase::Pending));
        let mut states: Vec<_> = running.chain(pending).collect();
        states.sort_by(|left, right| left.uid.cmp(&right.uid));
        states
    }
}

fn state(uid: &str, info: &WorkloadInfo, netns: NetnsId, state: Phase) -> PodState {
    PodState {
        uid: uid.to_owned(),
        name: info.name.clone(),
        namespace: info.namespace.clone(),
        state,
        netns,
    }
}

#[cfg(test)]
mod tests;
