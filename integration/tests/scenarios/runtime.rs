//! Real callers: containerd with runc through CRI, and cnitool, each with bridge, host-local and
//! portmap before ours. Needs root and the packages of `integration/setup.sh`.

mod absent;
mod burst;
mod chain;
mod cnitool;
mod containerd;
mod cri;
mod failures;
mod image;
mod images;
mod multus;
mod networks;
mod owned;
mod ports;
mod reboot;
mod recorder;
mod sandboxes;
mod versions;
mod waits;

const PORT: u16 = 8080;
