use anyhow::{Context as _, bail};
use nix::unistd::geteuid;
use std::os::unix::fs::MetadataExt as _;

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

/// A user namespace with a single user, as in an isolation without root.
pub fn is_alone() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().last() == Some("1")
}
