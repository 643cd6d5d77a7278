//! Checks that a ztunnel, or an agent, keeps the contract of ZDS (`proto/istio/workload/zds/README.md`).
//!
//! Against a ztunnel the kit plays the agent ([`ztunnel`]), against an agent ztunnels ([`agent`]), in lists of cases
//! ([`case`]). A case communicates over real sockets ([`wire`]) about real network namespaces ([`netns`]) and stops
//! at the first deviation. Every wait has a deadline.

pub mod agent;
pub mod case;
pub mod netns;
pub mod options;
pub mod process;
pub mod report;
pub mod run;
pub mod wire;
pub mod ztunnel;
