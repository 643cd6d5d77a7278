//! The kit against peers that keep the contract and peers that do not. Needs root, or `integration/isolate` in front
//! of `cargo test`, and a built workspace.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that fails panics, in its helpers too"
)]

mod faults;
mod peers;
mod run;
mod table;
