//! The node's probe set with each backend. Needs root, nft, iptables (both variants) and ipset.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what fails here fails a test"
)]

mod branch_eni;
mod leaving;
mod packets;
mod place;
mod repair;
mod set;
#[path = "../support/mod.rs"]
mod support;
