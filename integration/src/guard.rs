use std::{fmt::Display, fs::File, io::Write as _, os::unix::fs::MetadataExt as _, thread};

use anyhow::{Context as _, bail};
use nix::unistd::geteuid;

/// Fails outside `integration/isolate`, where rules would reach a real network.
#[expect(
    clippy::disallowed_methods,
    reason = "the isolation tells of itself through the environment"
)]
pub fn guard() -> anyhow::Result<()> {
    let hint = "run ./integration/test, or integration/isolate cargo test -p integration";
    let machine = std::env::var("INTEGRATION_MACHINE_NETNS").ok();
    let machine = machine.with_context(|| format!("these tests change rules: {hint}"))?;
    let here = std::fs::metadata("/proc/self/ns/net")
        .context("no /proc")?
        .ino()
        .to_string();
    if here == machine {
        bail!("this is the machine's own network: {hint}");
    }
    if !geteuid().is_root() {
        bail!("these tests need root in their namespaces: {hint}");
    }
    Ok(())
}

/// Returns whether the user namespace has a single user, as in an isolation without root.
pub fn is_alone() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().last() == Some("1")
}

/// Reports the current test as a test that cannot run here: `integration/test` names the test in its verdict.
///
/// # Panics
///
/// Panics if the file with the reports cannot be written.
#[expect(clippy::expect_used, reason = "a test that would pass unseen fails")]
pub fn not_run(why: impl Display) {
    let Some(path) = std::env::var_os("INTEGRATION_NOT_RUN") else {
        return;
    };
    let current = thread::current();
    let test = current.name().unwrap_or_default();
    let file = File::options().append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(format!("{test}: {why}\n").as_bytes()));
    written.expect("the list of tests that were not run");
}

/// Returns whether this is the full run of `integration/test --full`; otherwise reports the current test as not run.
pub fn is_full_run() -> bool {
    let is_full = std::env::var_os("INTEGRATION_FULL").is_some();
    if !is_full {
        not_run("only with --full");
    }
    is_full
}

/// Reports the current test as a test that needs more users than the single user of an isolation without root.
///
/// # Panics
///
/// Panics if the isolation has more users.
pub fn not_run_alone(why: impl Display) {
    assert!(is_alone(), "{why}");
    not_run(why);
}
