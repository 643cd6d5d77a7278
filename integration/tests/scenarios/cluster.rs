//! A real Kubernetes of one node: API server, controller manager, scheduler, kubelet and containerd, with
//! inpod from its chart and the reference ztunnel as a DaemonSet.

pub(crate) mod agent;
pub(crate) mod apps;
mod chart;
mod ends;
mod images;
pub(crate) mod injected;
mod istio_cni;
mod membership;
pub(crate) mod mesh;
mod node;
pub(crate) mod probes;
mod release;
pub(crate) mod repaired;
mod restarts;
pub(crate) mod sidecar;
mod start;
mod trace;
mod trial;
mod upgrades;
