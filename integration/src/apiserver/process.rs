//! Starts programs in the network namespace of the server.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::Context as _;
use inpod_linux::Netns;

/// Returns the program that a variable of the test script names.
pub fn tool(variable: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    let found = path.filter(|path| path.is_file());
    found.with_context(|| {
        format!("{variable} names no program: run ./integration/test apiserver, which gets it")
    })
}

pub(crate) fn enter(netns: &Netns, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", netns.path().display()))
        .arg(program)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null());
    command
}

pub(crate) fn spawn(mut command: Command, log: &Path) -> anyhow::Result<Child> {
    let log = fs::OpenOptions::new().create(true).append(true).open(log)?;
    command.stdout(log.try_clone()?).stderr(log);
    Ok(command.spawn()?)
}

pub(super) fn etcd(dir: &Path, netns: &Netns) -> anyhow::Result<Child> {
    let mut command = enter(netns, &tool("ETCD")?);
    command.arg("--data-dir").arg(dir.join("etcd"));
    command.args([
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--log-level=warn",
    ]);
    spawn(command, &dir.join("etcd.log"))
}
