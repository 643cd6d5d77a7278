//! The tasks of this node's pods, with everything that they do. Other modules use only what is exported here.

mod in_flight;
mod owners;
mod pipeline;
mod plan;
mod registry;
mod task;

pub(crate) use in_flight::AddWait;
pub use owners::Owners;
pub use pipeline::{Pipeline, Revisions, Synced};
pub(crate) use pipeline::{is_transient, work_deadline};
pub use plan::Action;
pub use registry::Registry;
pub use task::{AddCall, Added, OfflineAdd, Refusal, ReplayOutcome, Shared, View};
pub(crate) use task::{record_without_netns, should_be_enrolled, state, wall_clock};

#[cfg(test)]
pub(crate) use pipeline::NetnsState;
#[cfg(test)]
pub(crate) use task::shadow;
