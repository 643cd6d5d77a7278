//! Programs that tests write and execute.

use std::{path::Path, process::Command};

/// Copies a program that is to be executed. Another process writes it: one that another thread of this process starts
/// would inherit the copy, open for writing, and nobody can execute that.
pub(crate) fn install_program(from: &Path, to: &Path) {
    let mut install = Command::new("install");
    let status = install.args(["-m", "755"]).args([from, to]).status();
    assert!(status.unwrap().success(), "{}", to.display());
}
