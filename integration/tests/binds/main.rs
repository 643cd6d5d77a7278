//! The addresses to which applications bind: who reaches them without a mesh and in it, and what inpod predicts.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod bootstrap;
mod bound;
mod envoy;
mod reachability;
mod report;
mod sidecar;
