//! How an agent is brought to add and remove workloads: everybody's own way.

use std::{path::PathBuf, sync::mpsc, time::Duration};

pub use super::{exec::Exec, inpod::Inpod};

/// A workload as a driver is to bring it to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The pod's UID.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's service account.
    pub service_account: String,
    /// Its netns; `None` while the agent is not to know it.
    pub netns: Option<Place>,
}

/// A network namespace, by what an agent may want of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it can be opened while the kit holds it.
    pub path: PathBuf,
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// Why a driver did not do it, in its own words.
pub type Refusal = String;

/// Brings workloads to an agent. Calls may come from several threads.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// The agent was started anew: waits until it takes calls, and forgets what was said to the one before.
    ///
    /// # Errors
    ///
    /// It takes none in that time.
    fn begin(&self, within: Duration) -> Result<(), Refusal>;

    /// Tells the whole set: until then the agent does not know what is desired.
    ///
    /// # Errors
    ///
    /// The agent refused it.
    fn seed(&self, all: &[Workload]) -> Result<(), Refusal>;

    /// Adds a workload, or changes it; returns when a ztunnel serves it.
    ///
    /// # Errors
    ///
    /// None does in that time, or the agent refused it.
    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal>;

    /// Removes a workload.
    ///
    /// # Errors
    ///
    /// The agent refused it.
    fn remove(&self, uid: &str) -> Result<(), Refusal>;

    /// Whether the agent can be given a set with a workload whose netns is not known.
    fn can_withhold_netns(&self) -> bool;
}

/// An add that is under way.
#[derive(Debug)]
pub struct Adding(pub(crate) mpsc::Receiver<Result<(), Refusal>>);

impl Adding {
    /// What became of it, if that is known in time.
    pub fn outcome(&self, within: Duration) -> Option<Result<(), Refusal>> {
        self.0.recv_timeout(within).ok()
    }
}
