//! Defines how the kit adds and removes workloads; every agent has a driver of its own.

use std::{path::PathBuf, sync::mpsc, time::Duration};

pub use super::{exec::Exec, inpod::Inpod};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub service_account: String,
    /// The netns of the workload; `None` while the agent must not know the netns.
    pub netns: Option<Place>,
}

/// A netns by path and by identity, because agents differ in their use of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The path of the netns, valid while the kit holds the netns.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
}

/// The error text of a failed call, as the driver reports the error.
pub type Refusal = String;

/// Adds and removes the workloads of an agent, by calls that may come from several threads.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Waits until a new agent accepts calls, and forgets the state of the previous agent.
    fn begin(&self, within: Duration) -> Result<(), Refusal>;

    /// Sends the whole set of workloads to an agent without a set.
    fn seed(&self, all: &[Workload]) -> Result<(), Refusal>;

    /// Adds or changes a workload, and returns when a ztunnel serves the workload.
    fn add(&self, workload: &Workload, within: Duration) -> Result<(), Refusal>;

    fn remove(&self, uid: &str) -> Result<(), Refusal>;

    /// Returns whether a set may contain a workload whose netns is unknown.
    fn can_withhold_netns(&self) -> bool;
}

/// An add in progress, whose outcome arrives later.
#[derive(Debug)]
pub struct Adding(pub(crate) mpsc::Receiver<Result<(), Refusal>>);

impl Adding {
    pub fn outcome(&self, within: Duration) -> Option<Result<(), Refusal>> {
        self.0.recv_timeout(within).ok()
    }
}
