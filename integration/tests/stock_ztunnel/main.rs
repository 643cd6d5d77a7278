//! A stock ztunnel on ZDS: a pod's path from ADD to HBONE with mTLS, and ends of processes. `ZTUNNEL` names the
//! program; the feature `ztunnel` keeps this out of tiers without one. Needs root: each ztunnel runs in its pod's
//! cgroup with the capabilities of Istio's chart.
#![cfg(feature = "ztunnel")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that fails panics"
)]

#[path = "../common/clients.rs"]
mod clients;
#[path = "../common/flows.rs"]
mod flows;
#[path = "../common/ztunnel_pod.rs"]
mod ztunnel_pod;

mod handover;
mod loss;
mod mesh;
mod names;
mod refusals;
mod restarts;
mod traffic;
