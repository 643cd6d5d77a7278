//! Adds and removes workloads in the agent's own way.

use std::{path::PathBuf, sync::mpsc, time::Duration};

pub use super::{exec::Exec, inpod::Inpod};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub service_account: String,
    /// `None` while the agent must not know it.
    pub netns: Option<Place>,
}

/// By path and by identity: agents differ in what they use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Can be opened while the kit holds it.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
}

/// The driver's own error text.
pub type Refusal = String;

/// Adds and removes an agent's workloads. Calls may come from several threads.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Waits until a new agent accepts calls, and forgets the previous one's state.
    fn begin(&self, within: Duration) -> Result<(), Refusal>;

    /// Sends the whole set, which the agent does not know before.
    fn seed(&self, all: &[Workload]) -> Result<(), Refusal>;

    /// Returns when a ztunnel serves the new or changed workload.
    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal>;

    fn remove(&self, uid: &str) -> Result<(), Refusal>;

    /// Allows a set with a workload whose netns is unknown.
    fn can_withhold_netns(&self) -> bool;
}

/// An add in progress.
#[derive(Debug)]
pub struct Adding(pub(crate) mpsc::Receiver<Result<(), Refusal>>);

impl Adding {
    pub fn outcome(&self, within: Duration) -> Option<Result<(), Refusal>> {
        self.0.recv_timeout(within).ok()
    }
}
