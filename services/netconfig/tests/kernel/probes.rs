//! The node's probe set with each backend. Needs root, nft, iptables (both variants) and ipset.

mod branch_eni;
mod leaving;
mod packets;
mod place;
mod repair;
mod set;
