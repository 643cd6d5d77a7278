//! Executes the real binary with recorded calls of real runtimes (`tests/calls`) against a scripted agent.
// cfg(test) marks all of this as test code for clippy.
#![cfg(test)]

mod add;
mod bad_input;
mod del;
mod fake_agent;
mod fallback;
mod http2;
mod node;
mod other_verbs;
mod recorded;
mod state_dir;
mod usage;
