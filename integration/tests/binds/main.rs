//! What applications bind: who reaches them without a mesh and in it, and what is told of that before.
// cfg(test), so that clippy sees that all of this is a test.
#![cfg(test)]

mod bootstrap;
mod bound;
mod envoy;
mod reachability;
mod report;
mod sidecar;
