//! The vocabulary of sidecar injection: its labels and annotations, and how the lists in them are read.

pub mod keys;
mod lists;

pub use lists::{InvalidList, interfaces, networks, ports};
