//! The broker with scripted ztunnels.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod bench;
mod binary;
mod faults;
mod zds;
