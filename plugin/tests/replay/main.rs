//! Executes the real binary with what real runtimes sent (`tests/calls`), against an agent that answers by script.
// cfg(test), so that clippy sees that all of this is a test.
#![cfg(test)]

mod add;
mod bad_input;
mod del;
mod fake_agent;
mod fallback;
mod node;
mod other_verbs;
mod recorded;
mod usage;
