//! The installer as a process: what a runtime sees at any moment, whatever others write, and that uninstall leaves
//! nothing. Needs only its own directory; tests that mount need `integration/isolate`.

mod binary;
mod chain;
mod hostile;
mod killed;
mod leaving;
mod reader;
