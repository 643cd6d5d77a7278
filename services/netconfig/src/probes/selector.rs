use std::time::{Duration, Instant};

use super::{
    cgroup,
    kubelet::{self, Kubelet},
    settings::ProbeMatch,
};
use crate::error::SelectError;

/// After a failed search, unless a caller waits: it reads every process of the node.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// The sender whose packets are probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    Socket,
    User(u32),
    /// Sockets opened in a cgroup.
    Cgroup(Cgroup),
}

/// A cgroup of cgroup2, as the kernel identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cgroup {
    pub(crate) path: String,
    /// Directories below the root.
    pub(crate) level: u32,
    /// Inode number, new if the cgroup is recreated.
    pub(crate) id: u64,
}

/// Keeps the kubelet that was found.
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

    /// Returns `None` if a search for the kubelet failed recently and is not urgent.
    pub(crate) fn select(&mut self, is_urgent: bool) -> Option<Result<Selected, SelectError>> {
        match &self.wanted {
            ProbeMatch::Socket => Some(Ok(Selected::Socket)),
            ProbeMatch::Uid(user) => Some(Ok(Selected::User(*user))),
            ProbeMatch::Cgroup(path) => Some(cgroup::find(path).map(Selected::Cgroup)),
            ProbeMatch::Kubelet => self.kubelet(is_urgent),
            ProbeMatch::Off => None,
        }
    }

    /// Returns `None` unless probes are matched by it and it was found.
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
