//! Adds and removes an agent's workloads, in the way of that agent.

use std::{path::PathBuf, sync::mpsc, time::Duration};

pub use super::{exec::Exec, inpod::Inpod};

/// A workload as a driver presents it to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub service_account: String,
    /// Its netns; `None` while the agent must not know it.
    pub netns: Option<Place>,
}

/// A network namespace, by path and by identity: agents differ in which they use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// A path that can be opened while the kit holds it.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
}

/// The driver's own error text.
pub type Refusal = String;

/// Adds and removes workloads of an agent. Calls may come from several threads.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Waits until a newly started agent accepts calls, and forgets the state of the previous one.
    fn begin(&self, within: Duration) -> Result<(), Refusal>;

    /// Sends the whole set: until then, the agent does not know the desired state.
    fn seed(&self, all: &[Workload]) -> Result<(), Refusal>;

    /// Adds or changes a workload; returns when a ztunnel serves it.
    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal>;

    fn remove(&self, uid: &str) -> Result<(), Refusal>;

    /// Returns whether the agent can receive a set with a workload whose netns is unknown.
    fn can_withhold_netns(&self) -> bool;
}

/// An add in progress.
#[derive(Debug)]
pub struct Adding(pub(crate) mpsc::Receiver<Result<(), Refusal>>);

impl Adding {
    /// Returns the result, if there is one in time.
    pub fn outcome(&self, within: Duration) -> Option<Result<(), Refusal>> {
        self.0.recv_timeout(within).ok()
    }
}
