//! The broker with scripted ztunnels.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

/// In a process of its own: one that it starts has copies of the others' sockets until it executes, whose ends they would
/// then miss while their virtual time runs on.
mod alone {
    mod binary;
}
mod bench;
mod faults;
mod zds;
