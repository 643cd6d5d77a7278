//! netconfig in real network namespaces. Needs root, nft, iptables (both variants) and ipset.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod apply;
mod backends;
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
mod programs;
mod selftest;
mod service;
mod support;
