//! A real Kubernetes of one node: API server, controller manager, scheduler, kubelet and containerd, with
//! inpod from its chart and the reference ztunnel as a DaemonSet. The feature `kubernetes` keeps it out of
//! tiers without the programs.
#![cfg(feature = "kubernetes")]
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod agent;
mod apps;
mod chart;
mod ends;
mod injected;
mod mesh;
mod node;
mod probes;
mod release;
mod repaired;
mod restarts;
mod sidecar;
mod start;
mod trace;
