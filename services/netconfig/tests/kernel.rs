//! Rules, routes and ip rules in real network namespaces. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

mod support;

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use netconfig::{
    apply::Phase,
    error::ApplyError,
    inspect::{self, Proxies},
    rules::{Tag, scenarios},
};

use support::{Fresh, ambient, plain, sandbox};

fn applied() -> Fresh {
    let fresh = Fresh::new();
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    fresh
}

/// The tag of the rules in a netns.
fn tag_of(fresh: &Fresh) -> Option<Tag> {
    plain().observe(&fresh.netns).unwrap().tag
}

fn differences(fresh: &Fresh) -> Vec<String> {
    plain()
        .verify(&fresh.netns, &ambient())
        .unwrap()
        .differences
}

/// Everything that can be ours, as the tools show it.
fn everything(fresh: &Fresh) -> String {
    let shown = [
        "rule",
        "-6 rule",
        "route show table all",
        "-6 route show table all",
    ];
    let shown: Vec<_> = shown.iter().map(|arguments| fresh.ip(arguments)).collect();
    shown.concat() + &fresh.nft("list ruleset")
}

/// What is there is not what belongs there; says so; and is mended.
fn is_told_and_mended(fresh: &Fresh, named: &str) {
    let told = differences(fresh);
    assert!(
        told.iter().any(|sentence| sentence.contains(named)),
        "{named}: {told:?}"
    );
    assert!(
        plain()
            .apply(&fresh.netns, &ambient(), &sandbox("c1"))
            .unwrap()
            .changed
    );
    assert_eq!(differences(fresh), [""; 0]);
}

#[test]
fn what_was_applied_is_there_and_applying_it_again_writes_nothing() {
    let fresh = Fresh::new();
    let first = plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    let before = everything(&fresh);
    let second = plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!((first.changed, second.changed), (true, false));
    assert_eq!(first.fingerprint, second.fingerprint);
    assert_eq!(everything(&fresh), before);
    let tag = tag_of(&fresh).unwrap();
    assert_eq!(
        (tag.fingerprint, tag.sandbox.as_str()),
        (first.fingerprint, "net/c1/eth0")
    );
}

/// What nft lists, without our tags.
fn untagged(listed: &str) -> String {
    let is_tag = |line: &&str| line.contains("comment \"inpod schema=");
    let lines = listed.lines().filter(|line| !is_tag(line));
    lines.map(|line| format!("{line}\n")).collect()
}

/// And every toggle leads from every scenario to the next, with nothing stale.
#[test]
fn nft_lists_every_scenario_that_was_applied_as_it_lists_the_recorded_script() {
    let ours = Fresh::new();
    for (name, redirection) in scenarios::redirections() {
        let applied = plain().apply(&ours.netns, &redirection, &sandbox("c1"));
        assert!(applied.unwrap().changed, "{name}");
        let theirs = Fresh::new();
        let script = format!("{}/tests/golden/{name}.nft", env!("CARGO_MANIFEST_DIR"));
        theirs.command("nft", &["-f", &script]);
        let listed = ours.nft("list ruleset");
        assert_ne!(untagged(&listed), listed);
        assert_eq!(untagged(&listed), theirs.nft("list ruleset"), "{name}");
    }
}

#[test]
fn what_is_planned_is_what_is_done_and_after_it_nothing_is_planned() {
    let (ours, theirs) = (Fresh::new(), Fresh::new());
    for (name, redirection) in scenarios::redirections() {
        let plan = |fresh: &Fresh| {
            plain()
                .preview(&fresh.netns, &redirection, &sandbox("c1"))
                .unwrap()
        };
        let planned = plan(&ours);
        assert_ne!(planned.verified.differences, [""; 0], "{name}");
        carry_out(&theirs, &planned.transaction);
        plain()
            .apply(&ours.netns, &redirection, &sandbox("c1"))
            .unwrap();
        let after = plan(&ours);
        assert_eq!(after.verified.differences, [""; 0], "{name}");
        assert_eq!(after.transaction, "", "{name}");
        assert_eq!(everything(&theirs), everything(&ours), "{name}");
    }
}

/// Lines of sysctl, ip and conntrack are commands; all else is a script for nft.
fn carry_out(fresh: &Fresh, transaction: &str) {
    let mut script = String::new();
    for line in transaction.lines() {
        let is_command = ["sysctl ", "ip ", "conntrack "]
            .iter()
            .any(|known| line.starts_with(known));
        if is_command {
            let line = line.to_owned();
            // conntrack fails where there is no entry to delete.
            fresh.command(
                "sh",
                &["-c", &format!("{line} || expr '{line}' : conntrack")],
            );
        } else {
            script.push_str(line);
            script.push('\n');
        }
    }
    if !script.is_empty() {
        fresh.nft(&script);
    }
}

#[test]
fn the_routes_are_those_of_the_incumbent() {
    let fresh = applied();
    for family in ["-4", "-6"] {
        let rules = fresh.ip(&format!("{family} rule"));
        assert!(
            rules.contains("32764:\tfrom all fwmark 0x111/0xfff lookup 100"),
            "{rules}"
        );
    }
    let v4 = fresh.ip("route show table 100");
    assert!(
        v4.starts_with("local default dev lo") && v4.contains("scope host"),
        "{v4}"
    );
    let v6 = fresh.ip("-6 route show table 100");
    assert!(v6.starts_with("local default dev lo"), "{v6}");
}

#[test]
fn every_single_rule_that_is_deleted_is_told_and_mended() {
    let fresh = applied();
    let handles = |listed: &str| -> Vec<(String, String, String)> {
        let (mut found, mut table, mut chain) = (Vec::new(), String::new(), String::new());
        for line in listed.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words.as_slice() {
                ["table", "inet", name, ..] => table = (*name).to_owned(),
                ["chain", name, ..] => chain = (*name).to_owned(),
                [.., "#", "handle", handle] => {
                    found.push((table.clone(), chain.clone(), (*handle).to_owned()));
                }
                _ => {}
            }
        }
        found
    };
    let listed = || handles(&fresh.command("nft", &["-a", "list", "ruleset"]));
    let rules = listed().len();
    assert_eq!(rules, 9);
    for rule in 0..rules {
        let (table, chain, handle) = listed().swap_remove(rule);
        fresh.nft(&format!("delete rule inet {table} {chain} handle {handle}"));
        is_told_and_mended(&fresh, &format!("is missing in {table} {chain}"));
    }
}

#[test]
fn a_chain_a_table_a_route_and_an_ip_rule_that_is_deleted_is_told_and_mended() {
    let fresh = applied();
    fresh.nft("flush chain inet inpod-nat output; delete chain inet inpod-nat output");
    is_told_and_mended(&fresh, "chain inpod-nat output is missing");
    fresh.nft("delete table inet inpod-mangle");
    is_told_and_mended(&fresh, "table inpod-mangle is missing");
    fresh.nft("flush ruleset");
    is_told_and_mended(&fresh, "table inpod-nat is missing");
    for (family, name) in [("-4", "IPv4"), ("-6", "IPv6")] {
        fresh.ip(&format!("{family} rule del pref 32764"));
        is_told_and_mended(&fresh, &format!("the {name} ip rule"));
        fresh.ip(&format!(
            "{family} route del local default dev lo table 100"
        ));
        is_told_and_mended(&fresh, &format!("the {name} route"));
    }
}

#[test]
fn what_others_add_to_or_change_in_our_tables_is_told_and_mended() {
    let fresh = applied();
    fresh.nft("insert rule inet inpod-nat output limit rate 1/second accept");
    is_told_and_mended(
        &fresh,
        "rule `<limit> accept` is foreign in inpod-nat output",
    );
    fresh.nft("add chain inet inpod-nat theirs");
    is_told_and_mended(&fresh, "chain inpod-nat theirs is foreign");
    fresh.nft("add set inet inpod-nat theirs { type ipv4_addr; }");
    is_told_and_mended(&fresh, "holds 1 foreign sets or objects");
    fresh.nft("add chain inet inpod-mangle output { policy drop; }");
    is_told_and_mended(&fresh, "policy drop");
}

#[test]
fn a_last_removal_leaves_nothing_and_can_be_repeated() {
    let fresh = Fresh::new();
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_ne!(everything(&fresh), before);
    for _ in 0..2 {
        assert_eq!(
            plain()
                .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
                .unwrap()
                .captured_flows,
            0
        );
        assert_eq!(everything(&fresh), before);
    }
    assert_eq!(tag_of(&fresh), None);
}

#[test]
fn a_drain_replaces_capture_keeps_the_rest_and_can_be_repeated() {
    let fresh = applied();
    let mangle = || untagged(&fresh.nft("list table inet inpod-mangle"));
    let before = mangle();
    let tag = tag_of(&fresh);
    for _ in 0..2 {
        plain()
            .remove(&fresh.netns, &sandbox("c1"), Phase::Drain)
            .unwrap();
        let nat = fresh.nft("list table inet inpod-nat");
        assert!(!nat.contains("redirect"), "{nat}");
        assert_eq!(nat.matches("ct state new counter").count(), 2, "{nat}");
        assert_eq!(mangle(), before);
    }
    assert_ne!(tag_of(&fresh), tag);
    is_told_and_mended(&fresh, "redirect to :15001` is missing in inpod-nat output");
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Drain)
        .unwrap();
    assert_eq!(fresh.nft("list ruleset"), "");
}

#[test]
fn tables_rules_and_routes_of_others_stay() {
    let fresh = Fresh::new();
    fresh.nft("add table inet theirs { chain output { type nat hook output priority -100; }; }");
    fresh.nft("add table ip inpod-nat");
    fresh.ip("rule add fwmark 0x7/0xff pref 32764 lookup 100");
    fresh.ip("route add local 10.1.0.0/16 dev lo table 100");
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(everything(&fresh), before);
}

#[test]
fn an_equal_route_and_rule_of_others_are_used_and_not_taken_away() {
    let fresh = Fresh::new();
    fresh.ip("rule add fwmark 0x111/0xfff pref 32764 lookup 100");
    fresh.ip("route add local default dev lo table 100");
    let before = everything(&fresh);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(everything(&fresh), before);
}

#[test]
fn a_netns_without_ipv6_gets_no_ipv6_routes() {
    let fresh = Fresh::new();
    fresh.run(|| std::fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1").unwrap());
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(differences(&fresh), [""; 0]);
    assert!(!fresh.ip("-6 rule").contains("32764"));
    assert!(fresh.ip("rule").contains("32764"));
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
}

fn migrates(fresh: &Fresh) -> String {
    fresh.command("sysctl", &["-n", "net.ipv4.tcp_migrate_req"])
}

#[test]
fn waiting_connections_migrate_while_a_pod_is_enrolled_and_the_sysctl_is_restored() {
    let fresh = Fresh::new();
    assert_eq!(migrates(&fresh), "0\n");
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(migrates(&fresh), "1\n");
    // What a tag says of it outlives the tag.
    for phase in [Phase::Drain, Phase::Final] {
        assert_eq!(migrates(&fresh), "1\n");
        plain().remove(&fresh.netns, &sandbox("c1"), phase).unwrap();
    }
    assert_eq!(migrates(&fresh), "0\n");
}

#[test]
fn a_sysctl_that_was_on_stays_on_and_one_that_is_switched_back_is_told_and_mended() {
    let fresh = Fresh::new();
    fresh.command("sysctl", &["-q", "net.ipv4.tcp_migrate_req=1"]);
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(migrates(&fresh), "1\n");
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    fresh.command("sysctl", &["-q", "net.ipv4.tcp_migrate_req=0"]);
    is_told_and_mended(&fresh, "net.ipv4.tcp_migrate_req is 0");
}

/// As the first release wrote them, but for two of the rules, which stand for the rest.
#[test]
fn rules_of_the_first_schema_are_replaced() {
    let fresh = Fresh::new();
    let tag = "comment \"inpod schema=1 fingerprint=3717c2e820bb1348 sandbox=net/c1/eth0\"";
    fresh.nft(&format!(
        "table inet inpod-mangle {{ {tag}; chain prerouting {{ type filter hook prerouting priority -150; \
         meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111; }}; }}; \
         table inet inpod-nat {{ {tag}; chain output {{ type nat hook output priority -100; \
         ip daddr != 127.0.0.1 meta l4proto tcp meta mark & 0xfff != 0x539 counter redirect to :15001; }}; }}"
    ));
    assert_eq!(tag_of(&fresh).unwrap().schema, 1);
    is_told_and_mended(&fresh, "table inpod-nat is of schema 1, not 2");
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(fresh.nft("list ruleset"), "");
}

#[test]
fn a_netns_whose_loopback_is_down_is_refused_and_left_as_it_was() {
    let fresh = Fresh::down();
    let before = everything(&fresh);
    let error = plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap_err();
    assert!(matches!(error, ApplyError::LoopbackDown(_)), "{error:?}");
    assert!(error.to_string().contains("`lo` is down"), "{error}");
    assert_eq!(everything(&fresh), before);
}

/// A table that another process owns cannot be replaced; what had been added by then goes.
#[test]
fn a_refused_transaction_takes_routes_and_rules_back() {
    let fresh = Fresh::new();
    let mut nft = Command::new("nft");
    nft.arg("-i").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut owner = fresh.run(move || nft.spawn()).unwrap();
    let script = b"add table inet inpod-nat { flags owner; }\n";
    owner.stdin.as_mut().unwrap().write_all(script).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while !fresh.nft("list ruleset").contains("owner") {
        assert!(Instant::now() < deadline, "nft did not make its table");
    }
    let before = everything(&fresh);
    let error = plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap_err();
    assert!(
        matches!(&error, ApplyError::Backend { undo_failures, .. } if undo_failures.is_empty()),
        "{error:?}"
    );
    assert_eq!(everything(&fresh), before);
    owner.kill().unwrap();
    owner.wait().unwrap();
}

#[test]
fn tcp_sockets_of_both_families_are_seen_and_only_established_ones_on_ztunnels_ports_are_flows() {
    let fresh = Fresh::new();
    let nothing = inspect::sockets(&fresh.netns, &Proxies::default()).unwrap();
    assert_eq!(nothing, inspect::Sockets::default());
    let listen = |address| fresh.run(move || TcpListener::bind(address).unwrap());
    let listeners = ["127.0.0.1:15006", "[::1]:15008", "127.0.0.1:8080"].map(listen);
    let mut flows = Vec::new();
    for listener in &listeners {
        let address = listener.local_addr().unwrap();
        let client = fresh.run(move || TcpStream::connect(address).unwrap());
        flows.push((client, listener.accept().unwrap()));
    }
    let seen = inspect::sockets(&fresh.netns, &Proxies::default()).unwrap();
    assert_eq!(
        seen.listening_ports.into_iter().collect::<Vec<_>>(),
        [8080, 15006, 15008]
    );
    assert_eq!(seen.captured_flows, 2);
    drop((flows, listeners));
    // A process that another test starts holds every socket from its fork to its exec.
    let deadline = Instant::now() + Duration::from_secs(5);
    while inspect::sockets(&fresh.netns, &Proxies::default()).unwrap()
        != inspect::Sockets::default()
    {
        assert!(
            Instant::now() < deadline,
            "sockets that were closed are still seen"
        );
        std::thread::yield_now();
    }
}
