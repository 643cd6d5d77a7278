//! Decides how each request changes the pods of the node. The module starts and stops nothing: its methods return the
//! proxies to start and stop.

use std::collections::{BTreeMap, BTreeSet};

use zds_client::WorkloadInfo;

use crate::enter::{Netns, NetnsId};
use crate::options::Fault;
use crate::state_file::{Phase, PodState};

#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) uid: String,
    pub(crate) info: WorkloadInfo,
    pub(crate) netns: Netns,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission<P> {
    /// The pod already runs in this netns, and keeps its old info.
    Running,
    /// Start the pod, after stopping the proxy in the pod's former netns.
    Start { replaced: Option<P> },
}

/// The pods of the node; `P` is the proxy of a running pod.
#[derive(Debug)]
pub(crate) struct Pods<P> {
    running: BTreeMap<String, Running<P>>,
    pending: BTreeMap<String, Workload>,
    /// The UIDs that were named on this connection before its snapshot was complete.
    named: BTreeSet<String>,
    snapshot_complete: bool,
    fault: Fault,
    /// The pods that, by a fault, no later Add names.
    deleted: BTreeSet<String>,
}

#[derive(Debug)]
struct Running<P> {
    info: WorkloadInfo,
    netns: NetnsId,
    proxy: P,
}

impl<P> Pods<P> {
    pub(crate) const fn new(fault: Fault) -> Self {
        Self {
            running: BTreeMap::new(),
            pending: BTreeMap::new(),
            named: BTreeSet::new(),
            snapshot_complete: false,
            fault,
            deleted: BTreeSet::new(),
        }
    }

    /// Prepares a new connection: pods keep running, and everything else starts over.
    pub(crate) fn reconnected(&mut self) {
        if self.fault != Fault::PendingSurvives {
            self.pending.clear();
        }
        if self.fault != Fault::NamesOutliveTheConnection {
            self.named.clear();
        }
        self.snapshot_complete = false;
    }

    /// Decides about an Add. After [`Admission::Start`], the caller must call [`Self::started`] or [`Self::failed`]
    /// next.
    pub(crate) fn add(&mut self, workload: &Workload) -> Admission<P> {
        if !self.deleted.contains(&workload.uid) {
            self.name(&workload.uid);
        }
        let is_ignored =
            self.fault == Fault::PendingAddIgnored && self.pending.contains_key(&workload.uid);
        if is_ignored || self.runs(workload) {
            return Admission::Running;
        }
        let replaced = self.running.remove(&workload.uid);
        let replaced = replaced.map(|running| running.proxy);
        Admission::Start { replaced }
    }

    fn runs(&self, workload: &Workload) -> bool {
        self.running.get(&workload.uid).is_some_and(|running| {
            let is_same = running.netns == workload.netns.id();
            is_same && self.fault != Fault::RestartOnSameNetns
                || self.fault == Fault::StayInOldNetns
        })
    }

    fn name(&mut self, uid: &str) {
        if !self.snapshot_complete {
            self.named.insert(uid.to_owned());
        }
    }

    pub(crate) fn started(&mut self, workload: Workload, proxy: P) {
        self.pending.remove(&workload.uid);
        let running = Running {
            info: workload.info,
            netns: workload.netns.id(),
            proxy,
        };
        self.running.insert(workload.uid, running);
    }

    /// Records that opening the listeners failed; a retry follows.
    pub(crate) fn failed(&mut self, workload: Workload) {
        self.pending.insert(workload.uid.clone(), workload);
    }

    pub(crate) fn keep(&mut self, uid: &str) {
        if self.fault != Fault::KeepNothing {
            self.name(uid);
        }
    }

    pub(crate) fn knows(&self, uid: &str) -> bool {
        self.running.contains_key(uid) || self.pending.contains_key(uid)
    }

    /// Returns the proxy to stop now. Before the snapshot is complete, no proxy is stopped, because the snapshot shows
    /// the pods that stay.
    pub(crate) fn del(&mut self, uid: &str) -> Option<P> {
        if self.fault == Fault::DelIgnored {
            return None;
        }
        if self.fault != Fault::PendingSurvivesDel {
            self.pending.remove(uid);
        }
        if self.fault != Fault::DelInSnapshotIgnored {
            self.named.remove(uid);
        }
        if !self.snapshot_complete {
            if self.fault == Fault::DelInSnapshotSticks {
                self.deleted.insert(uid.to_owned());
            }
            return None;
        }
        self.running.remove(uid).map(|running| running.proxy)
    }

    /// Returns the proxies to stop after a SnapshotSent.
    pub(crate) fn complete_snapshot(&mut self) -> Vec<P> {
        self.snapshot_complete = true;
        let unnamed = if self.fault == Fault::NeverStopTheUnnamed {
            Vec::new()
        } else {
            self.take_unnamed()
        };
        self.named.clear();
        unnamed
    }

    /// Removes and returns the proxies of the pods that this connection has not named.
    pub(crate) fn take_unnamed(&mut self) -> Vec<P> {
        let unnamed = |uid: &String, _: &mut Running<P>| !self.named.contains(uid);
        let unnamed = self.running.extract_if(.., unnamed);
        unnamed.map(|(_, running)| running.proxy).collect()
    }

    /// Removes and returns the proxies of all pods.
    pub(crate) fn take(&mut self) -> Vec<P> {
        let running = std::mem::take(&mut self.running);
        running.into_values().map(|running| running.proxy).collect()
    }

    pub(crate) fn pending(&self) -> Vec<Workload> {
        self.pending.values().cloned().collect()
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(crate) const fn snapshot_complete(&self) -> bool {
        self.snapshot_complete
    }

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
