//! The CNI spec (1.1.0 and back to 0.3.0) as types, and the files that the plugin shares with `pod-events`.
//!
//! A runtime's call becomes an [`Invocation`](invocation::Invocation): one variant per verb, holding what that verb is
//! sure to have. Nothing here talks to the agent and nothing prints; that is the binary's. The only modules that touch
//! the world are [`spool`] and [`enrolled`] (files under the plugin's `stateDir`) and one function of [`invocation`]
//! (the `CNI_*` variables).

pub mod args;
pub mod config;
mod durable;
pub mod enrolled;
pub mod error;
pub mod invocation;
pub mod result;
pub mod spool;
pub mod version;
