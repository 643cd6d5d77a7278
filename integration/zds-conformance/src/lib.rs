//! Checks that a ztunnel, or an agent, keeps the contract of ZDS (`proto/istio/workload/zds/README.md`).
//!
//! To test a ztunnel, the kit plays the agent ([`ztunnel`]); to test an agent, the kit plays ztunnels ([`agent`]); both
//! modules have lists of cases ([`case`]). A case communicates over real sockets ([`wire`]) about real network
//! namespaces ([`netns`]), waits nowhere without a deadline, and stops at the first deviation.

pub mod agent;
pub mod case;
pub mod netns;
pub mod options;
pub mod process;
pub mod report;
pub mod run;
pub mod wire;
pub mod ztunnel;
