//! A stock ztunnel on ZDS: a pod's path from ADD to HBONE with mTLS, and ends of processes. `ZTUNNEL` names the
//! program. Needs root: each ztunnel runs in its pod's
//! cgroup with the capabilities of Istio's chart.

mod handover;
mod loss;
mod mesh;
mod names;
mod refusals;
mod restarts;
mod traffic;
