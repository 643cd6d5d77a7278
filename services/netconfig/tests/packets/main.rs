//! Packets' real destinations: with every redirection, during changes, and without one rule. Needs root.
//!
//! A short run tries a sample of settings and rules; with `INPOD_TESTS_ALL=1` all are tried.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what fails here fails a test"
)]
#![expect(
    clippy::print_stdout,
    reason = "which check needs which rule is worth reading"
)]

mod before;
mod checks;
mod client;
mod connections;
mod incumbent;
#[path = "../support/istio.rs"]
mod istio;
#[path = "../support/sidecar.rs"]
mod istio_sidecar;
mod matrix;
mod mutation;
mod names;
mod pairwise;
mod probe;
mod rush;
mod sidecar;
mod stand_in;
#[path = "../support/mod.rs"]
mod support;
mod world;
