//! A real Kubernetes of one node: API server, controller manager, scheduler, kubelet and containerd, with
//! inpod from its chart and the reference ztunnel as a DaemonSet.

mod agent;
mod apps;
mod chart;
mod ends;
mod injected;
mod istio_cni;
mod mesh;
mod node;
mod probes;
mod release;
mod repaired;
mod restarts;
mod sidecar;
mod start;
mod trace;
mod trial;
mod upgrades;
