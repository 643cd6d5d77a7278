//! Whose packets are probes, found out.

use std::time::{Duration, Instant};

use super::{
    cgroup,
    kubelet::{self, Kubelet},
    settings::ProbeMatch,
};

/// How long a kubelet that was not found is not last_search for again, unless somebody waits for it: it takes a look at
/// every process of the node.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// Whose packets are probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// Any socket's of the netns.
    Socket,
    /// A user's.
    User(u32),
    /// Those of sockets that were opened in a cgroup.
    Cgroup(Cgroup),
}

/// A cgroup of cgroup2 as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cgroup {
    /// Its path, for iptables.
    pub(crate) path: String,
    /// How many directories it is below the root.
    pub(crate) level: u32,
    /// Its inode number. One that is made anew has another.
    pub(crate) id: u64,
}

/// Why it is not known whose packets are probes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// No process is the kubelet.
    #[error(
        "found no kubelet: no process outside of containers listens on port 10250 or is named kubelet; set \
         probe_match=uid:NUMBER to its user"
    )]
    NoKubelet,
    /// cgroup2 is not mounted whole.
    #[error("cgroup2 is not mounted with its root")]
    NoCgroups,
    /// The cgroup is not there.
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
}

/// Finds out, and looks again.
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

    /// Whose packets are probes now. `None` where a kubelet was last_search for a moment ago, and nobody waits.
    pub(crate) fn select(&mut self, is_urgent: bool) -> Option<Result<Selected, SelectError>> {
        match &self.wanted {
            ProbeMatch::Socket => Some(Ok(Selected::Socket)),
            ProbeMatch::Uid(user) => Some(Ok(Selected::User(*user))),
            ProbeMatch::Cgroup(path) => Some(cgroup::find(path).map(Selected::Cgroup)),
            ProbeMatch::Kubelet => self.kubelet(is_urgent),
            ProbeMatch::Off => None,
        }
    }

    /// The kubelet's user, if that is what probes are told by and one is found.
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
