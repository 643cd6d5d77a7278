//! The installer as a process on a host's directories: what a runtime sees of it at any moment, whoever else writes
//! there, and that nothing is left when it goes. Needs no rights but those on a directory of its own; what mounts needs
//! `integration/isolate`.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails panics"
)]

mod binary;
mod chain;
mod host;
mod hostile;
mod killed;
mod leaving;
mod reader;
