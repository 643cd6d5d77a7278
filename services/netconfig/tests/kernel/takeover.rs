//! Pods in which others wrote rules, or whose netns or node differs. Needs root and iptables-nft.

mod confined;
mod incumbent;
mod process;
mod sidecar;
mod tools;
mod users;
