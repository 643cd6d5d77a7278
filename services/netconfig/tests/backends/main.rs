//! The same promises with every backend. Needs root, and iptables in both variants.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what fails here fails a test"
)]

mod applying;
mod choosing;
mod confined;
mod flows;
mod incumbent;
#[path = "../support/istio.rs"]
mod istio;
#[path = "../support/sidecar.rs"]
mod istio_sidecar;
mod killing;
mod mending;
mod process;
mod refusing;
mod replacing;
mod sidecar;
#[path = "../support/mod.rs"]
mod support;
mod tools;
mod users;
mod waiting;
