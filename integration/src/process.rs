use std::{
    ffi::OsStr,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, bail};

/// A binary of this workspace, built before; one of a directory where `INPOD_TEST_BINARIES` names it, so that what is
/// shipped can be measured by a harness that is not optimised.
///
/// # Errors
///
/// When it is not there, with the command that builds it.
pub fn bin(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os("INPOD_TEST_BINARIES") {
        let path = PathBuf::from(directory).join(name);
        anyhow::ensure!(path.is_file(), "{} is missing", path.display());
        return Ok(path);
    }
    let this = std::env::current_exe().context("where is this program?")?;
    // target/<profile>/demo, or target/<profile>/deps/<test>.
    let found = this
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file());
    found.with_context(|| format!("{name} is not built: cargo build --workspace"))
}

/// Runs a command and gives its standard output.
///
/// # Errors
///
/// When it cannot be run or fails, with its standard error.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: &[S]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = output.with_context(|| format!("cannot run {program}; is it installed?"))?;
    succeeded(program, &output)
}

/// The output of a command that must have succeeded.
pub(crate) fn succeeded(program: &str, output: &Output) -> anyhow::Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{program} failed ({}): {}{text}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(text)
}
