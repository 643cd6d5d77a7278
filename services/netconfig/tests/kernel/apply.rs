//! Rules, routes and ip rules in real network namespaces. Needs root.

mod mending;
mod refusing;
mod removing;
mod sysctl;
mod tag;

use netconfig::rules::Tag;

use crate::scenarios;
use crate::support::{Fresh, ambient, plain, sandbox};

fn applied() -> Fresh {
    let fresh = Fresh::new();
    plain()
        .apply(&fresh.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    fresh
}

fn tag_of(fresh: &Fresh) -> Option<Tag> {
    plain().observe(&fresh.netns).unwrap().tag
}

fn differences(fresh: &Fresh) -> Vec<String> {
    plain()
        .verify(&fresh.netns, &ambient())
        .unwrap()
        .differences
}

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

fn is_reported_and_repaired(fresh: &Fresh, named: &str) {
    let reported = differences(fresh);
    assert!(
        reported.iter().any(|sentence| sentence.contains(named)),
        "{named}: {reported:?}"
    );
    assert!(
        plain()
            .apply(&fresh.netns, &ambient(), &sandbox("c1"))
            .unwrap()
            .changed
    );
    assert_eq!(differences(fresh), [""; 0]);
}

/// containerd runs the plugin `loopback` beside those of the pod's network (go-cni, `Setup`).
#[test]
fn a_loopback_that_is_down_is_set_up_with_the_rules() {
    for (name, redirection) in scenarios::redirections() {
        let fresh = Fresh::down();
        for _ in 0..2 {
            let applied = plain().apply(&fresh.netns, &redirection, &sandbox("c1"));
            assert!(applied.unwrap().changed, "{name}");
            let verified = plain().verify(&fresh.netns, &redirection).unwrap();
            assert_eq!(verified.differences, [""; 0], "{name}");
            if !fresh.ip("link show lo").contains("LOOPBACK,UP") {
                // IPv4 alone has its route also while `lo` is down.
                assert_ne!(name, "plain");
                break;
            }
            // The kernel deletes the routes.
            fresh.ip("link set lo down");
        }
    }
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

fn untagged(listed: &str) -> String {
    let is_tag = |line: &&str| line.contains("comment \"inpod schema=");
    let lines = listed.lines().filter(|line| !is_tag(line));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Also applies each scenario after each other one: nothing stale may be left.
#[test]
fn nft_lists_every_scenario_that_was_applied_as_it_lists_the_recorded_script() {
    let ours = Fresh::new();
    for (name, redirection) in scenarios::redirections() {
        let applied = plain().apply(&ours.netns, &redirection, &sandbox("c1"));
        assert!(applied.unwrap().changed, "{name}");
        let theirs = Fresh::new();
        let script = format!("{}/tests/goldens/{name}.nft", env!("CARGO_MANIFEST_DIR"));
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
        execute(&theirs, &planned.transaction);
        plain()
            .apply(&ours.netns, &redirection, &sandbox("c1"))
            .unwrap();
        let after = plan(&ours);
        assert_eq!(after.verified.differences, [""; 0], "{name}");
        assert_eq!(after.transaction, "", "{name}");
        assert_eq!(everything(&theirs), everything(&ours), "{name}");
    }
}

/// Lines of sysctl, ip and conntrack are commands, all others an nft script.
fn execute(fresh: &Fresh, transaction: &str) {
    let mut script = String::new();
    for line in transaction.lines() {
        let is_command = ["sysctl ", "ip ", "conntrack "]
            .iter()
            .any(|known| line.starts_with(known));
        if is_command {
            let line = line.to_owned();
            // conntrack fails without an entry to delete.
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
            rules.contains("500:\tfrom all fwmark 0x111/0xfff lookup 10500"),
            "{rules}"
        );
    }
    let v4 = fresh.ip("route show table 10500");
    assert!(
        v4.starts_with("local default dev lo") && v4.contains("scope host"),
        "{v4}"
    );
    let v6 = fresh.ip("-6 route show table 10500");
    assert!(v6.starts_with("local default dev lo"), "{v6}");
}
