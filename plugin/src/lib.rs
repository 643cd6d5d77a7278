//! Types of the CNI spec (1.1.0 back to 0.3.0), and the files that the plugin shares with `pod-events`.
//!
//! A runtime's call is parsed into an [`Invocation`](invocation::Invocation), which has a variant per verb with the
//! parameters that the verb requires. The library neither calls the agent nor prints. Its only I/O is in [`spool`] and
//! [`enrolled`] (files in the plugin's `stateDir`), and [`invocation`] reads the `CNI_*` variables.

pub mod args;
pub mod config;
mod durable;
pub mod enrolled;
pub mod error;
pub mod invocation;
pub mod result;
pub mod spool;
pub mod version;
