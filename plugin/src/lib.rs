//! Types of the CNI spec (1.1.0 back to 0.1.0), and the files shared with `pod-events`.
//!
//! A call is parsed into an [`Invocation`](invocation::Invocation), with a variant per verb. The library
//! neither calls the agent nor prints; its only I/O is in [`spool`], [`call_log`] and [`enrolled`], and
//! [`invocation`] reads the `CNI_*` variables.

pub mod args;
pub mod call_log;
pub mod config;
mod directory;
pub mod enrolled;
pub mod error;
pub mod invocation;
pub mod result;
pub mod spool;
pub mod version;
