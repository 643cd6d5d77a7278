//! The real binary against an agent played packet by packet, with network namespaces as pods. Needs root, or `unshare
//! --user --map-root-user --net` before `cargo test`; leaves its own network namespace unchanged.
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
