use std::{
    collections::BTreeSet,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, bail};

/// Returns a built binary of this workspace, or of `INPOD_TEST_BINARIES`, so that an unoptimized harness can measure
/// release binaries.
pub fn bin(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os("INPOD_TEST_BINARIES") {
        let path = PathBuf::from(directory).join(name);
        anyhow::ensure!(path.is_file(), "{} is missing", path.display());
        return Ok(path);
    }
    let this = std::env::current_exe().context("where is this program?")?;
    // This program is target/<profile>/demo, or target/<profile>/deps/<test>.
    let found = this
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file());
    found.with_context(|| format!("{name} is not built: cargo build --workspace"))
}

/// Returns a copy of a binary that every user can run; a process makes one copy of each binary.
pub fn bin_for_all(name: &str) -> anyhow::Result<PathBuf> {
    static COPIES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
    let copy = PathBuf::from(format!("/run/{name}-{}", std::process::id()));
    if !copies.contains(&copy) {
        install_program(&bin(name)?, &copy)?;
        copies.insert(copy.clone());
    }
    Ok(copy)
}

/// Copies a program that is to be executed. Another process writes the copy: if this process did, a child started by
/// another thread could inherit the copy open for writing, and the kernel executes no file that is open for writing.
pub fn install_program(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mode = ["-m", "755"].map(OsStr::new);
    let paths = [from.as_os_str(), to.as_os_str()];
    run("install", &[mode, paths].concat()).map(drop)
}

/// Runs a program and returns its standard output; an error contains standard error.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: &[S]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = output.with_context(|| format!("cannot run {program}; is it installed?"))?;
    succeeded(program, &output)
}

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
