//! Addresses to which applications bind: reachability outside and in the mesh, and inpod's prediction.

mod bound;
mod envoy;
mod reachability;
mod report;
mod sidecar;
