//! Determines which packets are probes.

use std::time::{Duration, Instant};

use super::{
    cgroup,
    kubelet::{self, Kubelet},
    settings::ProbeMatch,
};

/// Delay after a failed search for the kubelet, unless a caller waits for it: a search reads every process of the node.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// The sender whose packets are probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// Any socket of the node's netns.
    Socket,
    User(u32),
    /// Sockets that were opened in a cgroup.
    Cgroup(Cgroup),
}

/// A cgroup of cgroup2, as the kernel identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cgroup {
    /// The path, for iptables.
    pub(crate) path: String,
    /// Number of directories below the root.
    pub(crate) level: u32,
    /// Inode number. A recreated cgroup has another one.
    pub(crate) id: u64,
}

/// An error of determining which packets are probes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    #[error(
        "found no kubelet: no process outside of containers listens on port 10250 or is named kubelet; set \
         probe_match=uid:NUMBER to its user"
    )]
    NoKubelet,
    /// Only a part of cgroup2 is mounted, or none.
    #[error("cgroup2 is not mounted with its root")]
    NoCgroups,
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
}

/// Determines the sender of probes, and keeps the kubelet that was found.
#[derive(Debug)]
pub(crate) struct Selector {
    wanted: ProbeMatch,
    kubelet: Option<Kubelet>,
    last_search: Option<Instant>,
}

impl Selector {
    pub(crate) fn new(wanted: ProbeMatch) -> Self {
        Self {
            wanted,
            kubelet: None,
            last_search: None,
        }
    }

    /// Returns the current sender. Returns `None` if a search for the kubelet failed recently and is not urgent.
    pub(crate) fn select(&mut self, is_urgent: bool) -> Option<Result<Selected, SelectError>> {
        match &self.wanted {
            ProbeMatch::Socket => Some(Ok(Selected::Socket)),
            ProbeMatch::Uid(user) => Some(Ok(Selected::User(*user))),
            ProbeMatch::Cgroup(path) => Some(cgroup::find(path).map(Selected::Cgroup)),
            ProbeMatch::Kubelet => self.kubelet(is_urgent),
            ProbeMatch::Off => None,
        }
    }

    /// Returns the kubelet's user if probes are matched by it and it was found.
    pub(crate) fn kubelet_user(&self) -> Option<u32> {
        self.kubelet.as_ref().map(|kubelet| kubelet.user)
    }

    fn kubelet(&mut self, is_urgent: bool) -> Option<Result<Selected, SelectError>> {
        let known = self.kubelet.as_ref().filter(|known| known.is_alive());
        if known.is_none() {
            if !is_urgent
                && self
                    .last_search
                    .is_some_and(|last_search| last_search.elapsed() < SEARCH_INTERVAL)
            {
                return None;
            }
            self.last_search = Some(Instant::now());
            self.kubelet = kubelet::find();
            if let Some(Kubelet { pid, user, .. }) = &self.kubelet {
                tracing::info!(pid, user, "Found the kubelet");
            }
        }
        let user = self.kubelet_user().map(Selected::User);
        Some(user.ok_or(SelectError::NoKubelet))
    }
}
