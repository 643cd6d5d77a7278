//! Scenarios with the real binaries.
// With cfg(test), clippy treats all of this as tests.
#![cfg(test)]

#[path = "../common/clients.rs"]
mod clients;
#[path = "../common/flows.rs"]
mod flows;
#[path = "../common/incumbent.rs"]
mod incumbent;
#[path = "../common/scripted.rs"]
mod scripted;
#[path = "../common/ztunnel_pod.rs"]
mod ztunnel_pod;

/// Waits until the kernel has checked that a pod's addresses are unique: it adds routes until then.
fn until_addresses_are_checked(pod: &integration::Pod) -> anyhow::Result<()> {
    integration::eventually("the addresses are checked", integration::TIMEOUT, || {
        let tentative = pod.exec(&["ip", "-6", "addr", "show", "tentative"])?;
        anyhow::ensure!(tentative.is_empty(), "{tentative}");
        Ok(())
    })
}

/// Tests of times, of load and of what a process costs: `integration/test` runs them one after another.
mod alone {
    mod broker_restart;
    mod burst;
    mod limits;
    mod restart;
    mod takeover;
    mod zds_storm;
}
