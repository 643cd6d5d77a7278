//! Rules in fresh network namespaces, by netconfig and by what it replaces.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{fresh_netns, run};
use netconfig::{
    apply::{Applied, Writer},
    rules::{Ambient, Redirection},
};

use crate::{
    incumbent,
    table::{Row, record, table, timed},
};

/// `f` runs in its own network namespace with `lo` up and reports the time.
fn in_fresh_netns(
    f: impl FnOnce(&Netns) -> anyhow::Result<Duration> + Send,
) -> anyhow::Result<Duration> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            fresh_netns()?;
            run("ip", &["link", "set", "lo", "up"])?;
            f(&Netns::current()?)
        });
        thread
            .join()
            .unwrap_or_else(|_| anyhow::bail!("a sample panicked"))
    })
}

pub(crate) fn feed(program: &str, arguments: &[&str], text: &str) -> anyhow::Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    let stdin = child.stdin.take().context("no standard input")?;
    { stdin }.write_all(text.as_bytes())?;
    ensure!(child.wait()?.success(), "{program} failed");
    Ok(())
}

fn iptables_script(loopback: &str) -> String {
    format!(
        "*mangle\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A PREROUTING -j ISTIO_PRERT\n-A OUTPUT -j ISTIO_OUTPUT\n\
         -A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff\n\
         -A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xfff --ctmask 0xfff\nCOMMIT\n\
         *nat\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A PREROUTING -j ISTIO_PRERT\n\
         -A ISTIO_PRERT ! -d {loopback} -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006\n\
         -A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT\n-A ISTIO_OUTPUT ! -d {loopback} -o lo -j ACCEPT\n\
         -A ISTIO_OUTPUT ! -d {loopback} -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001\nCOMMIT\n"
    )
}

fn restore(variant: &str) -> anyhow::Result<()> {
    let (v4, v6) = (iptables_script("127.0.0.1/32"), iptables_script("::1/128"));
    feed(&format!("iptables-{variant}-restore"), &["--noflush"], &v4)?;
    feed(&format!("ip6tables-{variant}-restore"), &["--noflush"], &v6)
}

fn routes_by_ip() -> anyhow::Result<()> {
    let v4 = "rule add fwmark 0x111/0xfff pref 32764 lookup 100\nroute replace local 0.0.0.0/0 dev lo table 100\n";
    feed("ip", &["-batch", "-"], v4)?;
    feed(
        "ip",
        &["-6", "-batch", "-"],
        &v4.replace("0.0.0.0/0", "::/0"),
    )
}

fn sandbox() -> anyhow::Result<inpod_types::SandboxRef> {
    Ok(inpod_types::SandboxRef {
        network_name: "bench".parse()?,
        container_id: "bench".parse()?,
        ifname: "eth0".parse()?,
    })
}

fn ambient() -> Redirection {
    Redirection::Ambient(Ambient::default())
}

/// Returns Istio's node agent's defaults, including DNS and probes.
fn everything() -> anyhow::Result<Redirection> {
    let sources = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];
    let sources = sources.map(str::parse).into_iter();
    Ok(Redirection::Ambient(Ambient {
        dns_capture: true,
        probe_sources: sources.collect::<Result<_, _>>()?,
        ..Ambient::default()
    }))
}

/// One for all pods, as in the service.
static WRITER: LazyLock<Writer> = LazyLock::new(Writer::default);

fn apply(netns: &Netns, redirection: &Redirection) -> anyhow::Result<Applied> {
    Ok(WRITER.apply(netns, redirection, &sandbox()?)?)
}

pub(crate) fn rules(samples: usize) -> anyhow::Result<()> {
    let script = ambient().ruleset().to_string();
    let mut rows = [
        Row::new("netconfig: rules, routes and ip rules, all read back"),
        Row::new("netconfig: rules alone (the routes are there), read back"),
        Row::new("`nft -f -`, rules alone"),
        Row::new("`iptables-nft-restore` v4 + v6, rules alone"),
        Row::new("`iptables-legacy-restore` v4 + v6, rules alone"),
        Row::new("`ip -batch` v4 + v6, routes and ip rules alone"),
    ];
    let program = |netns: &Netns| {
        let started = Instant::now();
        ensure!(apply(netns, &ambient())?.changed, "nothing was written");
        Ok(started.elapsed())
    };
    let rules_alone = |netns: &Netns| {
        apply(netns, &ambient())?;
        run("nft", &["flush", "ruleset"])?;
        program(netns)
    };
    for _ in 0..samples {
        let times = [
            in_fresh_netns(program)?,
            in_fresh_netns(rules_alone)?,
            in_fresh_netns(|_| timed(|| feed("nft", &["-f", "-"], &script)))?,
            in_fresh_netns(|_| timed(|| restore("nft")))?,
            in_fresh_netns(|_| timed(|| restore("legacy")))?,
            in_fresh_netns(|_| timed(routes_by_ip))?,
        ];
        record(&mut rows, times);
    }
    table("Rules in a fresh netns", &rows)
}

pub(crate) fn again(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("netconfig: everything read back, nothing written"),
        Row::new("the incumbent's check by iptables-nft: two saves, and `-C` for each rule"),
        Row::new("the incumbent's check by iptables-legacy"),
    ];
    let by_netconfig = |netns: &Netns| {
        let everything = everything()?;
        apply(netns, &everything)?;
        let started = Instant::now();
        ensure!(!apply(netns, &everything)?.changed, "something was written");
        Ok(started.elapsed())
    };
    for _ in 0..samples {
        let times = [
            in_fresh_netns(by_netconfig)?,
            in_fresh_netns(|_| incumbent::check("nft"))?,
            in_fresh_netns(|_| incumbent::check("legacy"))?,
        ];
        record(&mut rows, times);
    }
    table("A pod whose rules are there", &rows)
}

/// Measures two workers, each with an existing netns.
pub(crate) fn workers(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("netconfig, two workers, per pod: rules, routes and ip rules, read back"),
        Row::new("`nft -f -`, two workers, per pod: rules alone"),
    ];
    let script = ambient().ruleset().to_string();
    for _ in 0..samples.div_ceil(10) {
        let by_netconfig = per_pod(|netns| apply(netns, &ambient()).map(drop))?;
        let by_nft = per_pod(|netns| netns.within(|| feed("nft", &["-f", "-"], &script))?)?;
        record(&mut rows, [by_netconfig, by_nft]);
    }
    table("Pods at once", &rows)
}

/// Returns the average while two workers process ten pods each.
fn per_pod(f: impl Fn(&Netns) -> anyhow::Result<()> + Sync) -> anyhow::Result<Duration> {
    const EACH: u32 = 10;
    let batches = [pods(EACH)?, pods(EACH)?];
    let started = Instant::now();
    thread::scope(|scope| {
        let worker = |batch: &'_ [Netns]| batch.iter().try_for_each(&f);
        let workers = batches
            .each_ref()
            .map(|batch| scope.spawn(move || worker(batch)));
        for worker in workers {
            let done = worker.join();
            done.unwrap_or_else(|_| anyhow::bail!("a worker panicked"))?;
        }
        anyhow::Ok(())
    })?;
    Ok(started.elapsed() / (2 * EACH))
}

fn pods(count: u32) -> anyhow::Result<Vec<Netns>> {
    let pod = |_| {
        let netns = Netns::create()?;
        netns.within(|| run("ip", &["link", "set", "lo", "up"]))??;
        anyhow::Ok(netns)
    };
    (0..count).map(pod).collect()
}

/// Measures a pod's cost if others have rules already, with netconfig and without.
pub(crate) fn fuller(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("rules of a pod, where 10 have theirs"),
        Row::new("rules of a pod, where 500 have theirs"),
        Row::new("`nft -f -`, rules alone, where 10 have theirs"),
        Row::new("`nft -f -`, rules alone, where 500 have theirs"),
    ];
    let [few, many, nft_few, nft_many] = &mut rows;
    let mut enrolled = enroll(10)?;
    // None ends meanwhile: destroying a netns costs the kernel more with their number, which is not ours.
    let mut kept = on_this_node(samples, few, nft_few)?;
    enrolled.extend(enroll(490)?);
    kept.extend(on_this_node(samples, many, nft_many)?);
    drop((enrolled, kept));
    table("Rules on a fuller node", &rows)
}

/// Measures by netconfig and then by nft, in existing netns. Not alternating: after an exec, netconfig's pods
/// would find cold caches.
fn on_this_node(samples: usize, ours: &mut Row, nfts: &mut Row) -> anyhow::Result<Vec<Netns>> {
    let script = ambient().ruleset().to_string();
    let mut pods = pods(u32::try_from(samples)?)?;
    for pod in &pods {
        ours.times.push(timed(|| apply(pod, &ambient()).map(drop))?);
    }
    let others = self::pods(u32::try_from(samples)?)?;
    for pod in &others {
        let by_nft = || pod.within(|| feed("nft", &["-f", "-"], &script))?;
        nfts.times.push(timed(by_nft)?);
    }
    pods.extend(others);
    Ok(pods)
}

fn enroll(count: u32) -> anyhow::Result<Vec<Netns>> {
    let pods = pods(count)?;
    pods.iter()
        .try_for_each(|pod| apply(pod, &ambient()).map(drop))?;
    Ok(pods)
}
