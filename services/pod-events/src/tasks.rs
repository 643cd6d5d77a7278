//! The tasks of this node's pods, with everything that they do. Other modules use only what is exported here, most of it
//! methods of [`Registry`].

mod in_flight;
mod owners;
mod pipeline;
mod plan;
mod registry;
mod task;

pub(crate) use in_flight::AddWait;
pub use pipeline::Synced;
pub(crate) use pipeline::is_transient;
pub use registry::Registry;
#[cfg(test)]
pub(crate) use task::Evidence;
pub(crate) use task::state;
pub use task::{AddCall, Added, OfflineAdd, Refusal, ReplayOutcome, Shared, View};

#[cfg(test)]
pub(crate) use pipeline::NetnsState;
#[cfg(test)]
pub(crate) use plan::{DELETE_TIMEOUT, GONE_GRACE, GONE_TIMEOUT};
#[cfg(test)]
pub(crate) use task::{DISCOVERY_DELAY, shadow};
