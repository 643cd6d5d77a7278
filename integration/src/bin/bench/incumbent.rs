//! Istio's node agent for a pod with rules, by the same programs (services/docs/facts/istio-ambient.md, 6.2 and 6.4):
//! it saves both families' rules and checks each with its own process. Its work between the processes is not counted.

use std::time::{Duration, Instant};

use anyhow::ensure;
use integration::run;

use crate::rules::feed;

/// Per family: loopback, and the probes' source.
const FAMILIES: [(&str, &str, &str); 2] = [
    ("iptables", "127.0.0.1/32", "169.254.7.127"),
    (
        "ip6tables",
        "::1/128",
        "fd16:9254:7127:1337:ffff:ffff:ffff:ffff",
    ),
];

fn rules(loopback: &str, probes: &str) -> Vec<(&'static str, String)> {
    let capture = "-m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports";
    let mut rules = Vec::new();
    for table in ["mangle", "nat", "raw"] {
        rules.push((table, "PREROUTING -j ISTIO_PRERT".to_owned()));
        rules.push((table, "OUTPUT -j ISTIO_OUTPUT".to_owned()));
    }
    rules.extend([
        ("mangle", "ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff".to_owned()),
        ("mangle", "ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned()),
        ("nat", format!("ISTIO_PRERT -s {probes} -p tcp -m tcp -j ACCEPT")),
        ("nat", format!("ISTIO_OUTPUT -d {probes} -p tcp -m tcp -j ACCEPT")),
        ("nat", format!("ISTIO_PRERT ! -d {loopback} -p tcp ! --dport 15008 {capture} 15006")),
        ("nat", format!("ISTIO_OUTPUT ! -o lo -p udp -m udp --dport 53 {capture} 15053")),
        ("nat", format!("ISTIO_OUTPUT ! -d {loopback} -p tcp --dport 53 {capture} 15053")),
        ("nat", "ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT".to_owned()),
        ("nat", format!("ISTIO_OUTPUT ! -d {loopback} -o lo -j ACCEPT")),
        ("nat", format!("ISTIO_OUTPUT ! -d {loopback} -p tcp {capture} 15001")),
        ("raw", "ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1".to_owned()),
        ("raw", "ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1".to_owned()),
    ]);
    rules
}

fn script(rules: &[(&str, String)]) -> String {
    let table = |name: &str| {
        let rules = rules.iter().filter(|(table, _)| *table == name);
        let rules: String = rules.map(|(_, rule)| format!("-A {rule}\n")).collect();
        format!("*{name}\n-N ISTIO_PRERT\n-N ISTIO_OUTPUT\n{rules}COMMIT\n")
    };
    ["mangle", "nat", "raw"].map(table).concat()
}

/// Writes the rules here, then measures the check.
pub(crate) fn check(variant: &str) -> anyhow::Result<Duration> {
    let mut families = Vec::new();
    for (program, loopback, probes) in FAMILIES {
        let rules = rules(loopback, probes);
        feed(
            &format!("{program}-{variant}-restore"),
            &["--noflush"],
            &script(&rules),
        )?;
        families.push((program, rules));
    }
    let started = Instant::now();
    for (program, _) in &families {
        let saved = run::<&str>(&format!("{program}-{variant}-save"), &[])?;
        ensure!(saved.contains("ISTIO_OUTPUT"), "nothing was saved");
    }
    for (program, rules) in &families {
        for (table, rule) in rules {
            let mut arguments = vec!["-t", table, "-C"];
            arguments.extend(rule.split(' '));
            run(&format!("{program}-{variant}"), &arguments)?;
        }
    }
    Ok(started.elapsed())
}
