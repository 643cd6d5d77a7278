//! Real callers: containerd with runc through CRI, and cnitool, each with bridge, host-local and
//! portmap before ours. Needs root and the packages of `integration/setup.sh`; the feature `containerd` keeps
//! it out of tiers without them.
#![cfg(feature = "containerd")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that fails panics"
)]

mod absent;
mod burst;
mod chain;
mod cnitool;
mod cri;
mod failures;
mod image;
mod images;
mod owned;
mod ports;
mod reboot;
mod recorder;
mod runtime;
mod sandboxes;
mod versions;
mod waits;

const PORT: u16 = 8080;
