//! Checks whether a ztunnel, or an agent, keeps the contract of ZDS (`proto/istio/workload/zds/README.md`).
//!
//! Against a ztunnel the kit plays the agent ([`ztunnel`]), against an agent it plays ztunnels ([`agent`]). Both are
//! lists of cases ([`case`]). A case is a plain function that communicates over real sockets ([`wire`]) about real
//! network namespaces ([`netns`]) and stops at the first deviation from the contract. Every wait has a deadline.

pub mod agent;
pub mod case;
pub mod netns;
pub mod options;
pub mod process;
pub mod report;
pub mod run;
pub mod wire;
pub mod ztunnel;
