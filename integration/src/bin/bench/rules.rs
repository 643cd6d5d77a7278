//! Rules in fresh network namespaces, by netconfig and by what it replaces.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{fresh_netns, run};
use netconfig::{apply::apply, rules::Redirection};
use netns::Netns;

use crate::table::{Row, record, table, timed};

/// Runs something in a network namespace of its own, with `lo` up, and gives the time that it says it took.
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

/// Executes a program of the current netns with text on its standard input.
fn feed(program: &str, arguments: &[&str], text: &str) -> anyhow::Result<()> {
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

/// The same rules, as iptables knows them.
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

pub(crate) fn rules(samples: usize) -> anyhow::Result<()> {
    let sandbox = workload::SandboxRef {
        network_name: "bench".parse()?,
        container_id: "bench".parse()?,
        ifname: "eth0".parse()?,
    };
    let script = Redirection::Ambient.ruleset().to_string();
    let mut rows = [
        Row::new("netconfig: rules, routes and ip rules, all read back"),
        Row::new("netconfig: rules alone (the routes are there), read back"),
        Row::new("the same applied again: read back, nothing written"),
        Row::new("`nft -f -`, rules alone"),
        Row::new("`iptables-nft-restore` v4 + v6, rules alone"),
        Row::new("`iptables-legacy-restore` v4 + v6, rules alone"),
        Row::new("`ip -batch` v4 + v6, routes and ip rules alone"),
    ];
    let program = |netns: &Netns| {
        let started = Instant::now();
        let applied = apply(netns, Redirection::Ambient, &sandbox)?;
        ensure!(applied.changed, "nothing was written");
        Ok(started.elapsed())
    };
    let again = |netns: &Netns| {
        apply(netns, Redirection::Ambient, &sandbox)?;
        let started = Instant::now();
        let applied = apply(netns, Redirection::Ambient, &sandbox)?;
        ensure!(!applied.changed, "something was written");
        Ok(started.elapsed())
    };
    let rules_alone = |netns: &Netns| {
        apply(netns, Redirection::Ambient, &sandbox)?;
        run("nft", &["flush", "ruleset"])?;
        program(netns)
    };
    for _ in 0..samples {
        let times = [
            in_fresh_netns(program)?,
            in_fresh_netns(rules_alone)?,
            in_fresh_netns(again)?,
            in_fresh_netns(|_| timed(|| feed("nft", &["-f", "-"], &script)))?,
            in_fresh_netns(|_| timed(|| restore("nft")))?,
            in_fresh_netns(|_| timed(|| restore("legacy")))?,
            in_fresh_netns(|_| timed(routes_by_ip))?,
        ];
        record(&mut rows, times);
    }
    table("Rules in a fresh netns", &rows)
}
