//! Measures adding a pod to the node's probe set and removing it, compared with running `ipset`. Needs root,
//! and the program ipset.
//!
//! `cargo run --release -p netconfig --example time_probe_set -- 200`

use std::{
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_service::Readiness;
use inpod_types::SandboxRef;
use netconfig::probes::{ProbeSet, ProbeSettings, SetBackendKind};
use nix::sched::{CloneFlags, unshare};

/// Numbers of pods that are already in the set.
const OTHERS: [u16; 2] = [10, 500];

fn main() -> anyhow::Result<()> {
    let count = std::env::args()
        .nth(1)
        .map_or(Ok(200), |text| text.parse::<u16>())?;
    for others in OTHERS {
        // The netns ends with the thread.
        let measured = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            measure(others, count)
        });
        let measured = measured.join();
        measured.unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))?;
    }
    Ok(())
}

fn measure(others: u16, count: u16) -> anyhow::Result<()> {
    let host = ProbeSet::start(
        ProbeSettings::default(),
        SetBackendKind::Nftables,
        Readiness::default(),
    )?;
    ipset(&["create", "others", "hash:ip", "family", "inet", "comment"])?;
    for n in 0..others {
        host.set_addresses(&sandbox(n)?, &[address(n)].into())?;
        add(n)?;
    }
    let (mut named, mut again, mut released, mut executed) = (vec![], vec![], vec![], vec![]);
    // Separate loops: a started program would leave cold caches for the other measurements.
    let numbers = || others..others.saturating_add(count);
    for times in [&mut named, &mut again] {
        for n in numbers() {
            let (sandbox, addresses) = (sandbox(n)?, [address(n)].into());
            times.push(timed(|| host.set_addresses(&sandbox, &addresses))?);
        }
    }
    for n in numbers() {
        executed.push(timed(|| add(n))?);
    }
    for n in numbers() {
        let sandbox = sandbox(n)?;
        released.push(timed(|| host.release(&sandbox))?);
    }
    let mut out = io::stdout();
    writeln!(out, "{others} pods beside it:")?;
    let named = report("name, as a whole and read back", named)?;
    report("name again, nothing to do", again)?;
    report("release, as a whole and read back", released)?;
    let executed = report("ipset add, executed", executed)?;
    let ratio = executed.as_secs_f64() / named.as_secs_f64();
    writeln!(out, "  ratio of the medians, ipset to name: {ratio:.1}")?;
    Ok(())
}

fn sandbox(n: u16) -> anyhow::Result<SandboxRef> {
    Ok(SandboxRef {
        network_name: "bench".parse()?,
        container_id: format!("{n:064x}").parse()?,
        ifname: "eth0".parse()?,
    })
}

fn address(n: u16) -> IpAddr {
    let [high, low] = n.to_be_bytes();
    Ipv4Addr::new(10, 0, high, low).into()
}

fn add(n: u16) -> anyhow::Result<()> {
    let name = sandbox(n)?.to_string();
    ipset(&["add", "others", &address(n).to_string(), "comment", &name])
}

fn ipset(arguments: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("ipset").args(arguments).status();
    let status = status.context("ipset is needed (install ipset)")?;
    ensure!(status.success(), "ipset {arguments:?} failed");
    Ok(())
}

fn timed<T, E>(f: impl FnOnce() -> Result<T, E>) -> Result<Duration, E> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed())
}

fn report(what: &str, mut times: Vec<Duration>) -> io::Result<Duration> {
    times.sort();
    let at = |percent: usize| {
        let index = times.len().saturating_sub(1).saturating_mul(percent) / 100;
        times.get(index).copied().unwrap_or_default()
    };
    let (min, median, p99, n) = (at(0), at(50), at(99), times.len());
    writeln!(
        io::stdout(),
        "  {what}: median {median:?}, p99 {p99:?}, min {min:?}, n {n}"
    )?;
    Ok(median)
}
