//! Tests the kit against correct and faulty peers. The tests need root, or `integration/isolate` before `cargo test`,
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
