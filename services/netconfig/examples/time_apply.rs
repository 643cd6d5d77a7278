//! Measures apply on a fresh netns, again on the same, a verify, and an apply of a sidecar's redirection. Needs root.
//! iptables backends run through netconfig's binary, whose path has to be given.
//!
//! `cargo run --release -p netconfig --example time_apply -- 200`
//!
//! `cargo run --release -p netconfig --example time_apply -- 200 iptables-nft target/release/netconfig`

use std::{
    io::{self, Write as _},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_linux::Netns;
use inpod_types::SandboxRef;
use netconfig::{
    Backend, Programs,
    apply::Writer,
    rules::{Ambient, Redirection, scenarios},
};
use nix::sched::{CloneFlags, unshare};

fn main() -> anyhow::Result<()> {
    let count = std::env::args()
        .nth(1)
        .map_or(Ok(200), |text| text.parse::<u32>())?;
    let sandbox = SandboxRef {
        network_name: "bench".parse()?,
        container_id: "c1".parse()?,
        ifname: "eth0".parse()?,
    };
    let (writer, ambient) = (writer()?, Redirection::Ambient(Ambient::default()));
    let mut sidecars = scenarios::sidecar::all();
    let sidecar = sidecars.find(|(name, _)| *name == "basic");
    let (_, sidecar) = sidecar.context("no such scenario")?;
    let sidecar = Redirection::Sidecar(sidecar);
    let (mut fresh, mut again, mut compared) = (Vec::new(), Vec::new(), Vec::new());
    let mut of_sidecars = Vec::new();
    let mut held = Vec::new();
    for _ in 0..count {
        let netns = new_netns()?;
        fresh.push(timed(|| writer.apply(&netns, &ambient, &sandbox))?);
        again.push(timed(|| writer.apply(&netns, &ambient, &sandbox))?);
        compared.push(timed(|| writer.verify(&netns, &ambient))?);
        let other = new_netns()?;
        of_sidecars.push(timed(|| writer.apply(&other, &sidecar, &sandbox))?);
        held.push(other);
        // Kept: its removal by the kernel is not part of the measurement.
        held.push(netns);
    }
    report("apply, fresh netns", fresh)?;
    report("apply, nothing to do", again)?;
    report("verify", compared)?;
    report("apply of a sidecar, fresh netns", of_sidecars)?;
    Ok(())
}

fn writer() -> anyhow::Result<Writer> {
    let mut arguments = std::env::args().skip(2);
    let (Some(name), Some(runner)) = (arguments.next(), arguments.next()) else {
        return Ok(Writer::default());
    };
    let mut all = Backend::ALL.into_iter();
    let backend = all.find(|backend| backend.name() == name);
    let backend = backend.context("no such backend")?;
    let locks = std::env::temp_dir().join("time_apply-locks");
    let directories = ["/usr/sbin", "/sbin"].map(Path::new);
    Ok(Writer {
        configured: Some(backend),
        detected: backend,
        programs: Programs::search_in(&directories, Path::new(&runner), &locks),
        ..Writer::default()
    })
}

/// Creates a netns with `lo` up, from a thread that ends.
fn new_netns() -> anyhow::Result<Netns> {
    let made = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status()?;
        Ok(Netns::current()?)
    });
    made.join()
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
}

fn timed<T, E>(f: impl FnOnce() -> Result<T, E>) -> Result<Duration, E> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed())
}

fn report(what: &str, mut times: Vec<Duration>) -> io::Result<()> {
    times.sort();
    let at = |percent: usize| {
        let index = times.len().saturating_sub(1).saturating_mul(percent) / 100;
        times.get(index).copied().unwrap_or_default()
    };
    let (min, median, p99, n) = (at(0), at(50), at(99), times.len());
    writeln!(
        io::stdout(),
        "{what}: median {median:?}, p99 {p99:?}, min {min:?}, n {n}"
    )
}
