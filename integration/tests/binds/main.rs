//! Addresses to which applications bind: reachability outside and in the mesh, and inpod's prediction.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod bound;
mod envoy;
mod reachability;
mod report;
mod sidecar;
