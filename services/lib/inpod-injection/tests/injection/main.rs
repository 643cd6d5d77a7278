//! Injection of recorded and of random pods.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

mod golden;
mod properties;
