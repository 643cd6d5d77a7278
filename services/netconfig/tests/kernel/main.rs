//! netconfig in real network namespaces. Needs root, nft and iptables.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod apply;
mod drift;
mod golden;
mod harness;
mod istio;
mod istio_sidecar;
mod kernel_version;
mod look;
mod name;
mod packets;
mod probes;
#[path = "../scenarios/scenarios.rs"]
mod scenarios;
mod selftest;
mod service;
mod support;
mod takeover;
