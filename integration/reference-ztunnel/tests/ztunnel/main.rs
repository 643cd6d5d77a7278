//! Tests the real binary against an agent that is played packet by packet, with network namespaces as pods. The tests
//! need root, or `unshare --user --map-root-user --net` before `cargo test`, and leave their own network namespace
//! unchanged.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test stops at what it did not expect, in its helpers too"
)]

mod agent;
mod faults;
mod forwarding;
mod hbone;
mod network;
mod zds;
mod ztunnel;
