//! The kit against correct and faulty peers. Needs root, or `integration/isolate` before `cargo test`,
//! and a built workspace.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that fails panics, in its helpers too"
)]

mod faults;
mod peers;
mod run;
mod table;
