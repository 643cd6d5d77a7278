//! The node's probe set. Needs root, nft and iptables-nft.

mod branch_eni;
mod forged;
mod leaving;
mod packets;
mod place;
mod repair;
mod set;
