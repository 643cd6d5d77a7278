//! The node's probe set. Needs root, nft and iptables-nft.

mod branch_eni;
mod leaving;
mod packets;
mod place;
mod repair;
mod set;
