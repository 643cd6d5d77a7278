//! Real callers: containerd with runc through CRI, cnitool, and podman, each with bridge, host-local and
//! portmap before ours. Needs root and the packages of `integration/setup.sh`; the feature `containerd` keeps
//! it out of tiers without them.
#![cfg(feature = "containerd")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that fails panics"
)]

mod absent;
mod api_server;
mod bench;
mod binds;
mod burst;
mod chain;
mod cnitool;
mod cri;
mod failures;
mod image;
mod images;
mod kubelet;
mod nodes;
mod owned;
mod podman;
mod ports;
mod reboot;
mod recorder;
mod runtime;
mod sandboxes;
mod sidecar;
mod sidecar_missed;
mod sidecar_repair;
mod unprivileged;
mod versions;
mod waits;

const PORT: u16 = 8080;
