//! Packets' real destinations: with every redirection, during changes, and without one rule. Needs root.
//!
//! A short run tries a sample of settings and rules; with `INTEGRATION_FULL=1` all are tried.

mod before;
mod checks;
mod client;
mod connections;
mod guard;
mod incumbent;
mod matrix;
mod mutation;
mod names;
mod pairwise;
mod probe;
mod routing;
mod rush;
mod sidecar;
mod stand_in;
mod udp;
mod world;
