//! The same promises with every backend. Needs root, and iptables in both variants.

mod applying;
mod choosing;
mod confined;
mod flows;
mod incumbent;
mod killing;
mod mending;
mod process;
mod refusing;
mod replacing;
mod sidecar;
mod tools;
mod users;
mod waiting;
