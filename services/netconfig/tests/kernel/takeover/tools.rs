//! A netns's content as the tools show it.

use netconfig::Family;

use crate::support::{Fresh, ambient, plain, sandbox};

/// Has ambient mode's default redirection.
pub(crate) fn applied() -> Fresh {
    let fresh = Fresh::new();
    apply(&fresh);
    fresh
}

pub(crate) fn apply(fresh: &Fresh) -> bool {
    let applied = plain().apply(&fresh.netns, &ambient(), &sandbox("c1"));
    applied.unwrap().changed
}

pub(crate) fn differences(fresh: &Fresh) -> Vec<String> {
    let verified = plain().verify(&fresh.netns, &ambient());
    verified.unwrap().differences
}

/// Returns what iptables-nft-save prints without comments, which contain the time.
pub(crate) fn saved(fresh: &Fresh, family: Family) -> String {
    let program = match family {
        Family::V4 => "iptables-nft-save",
        Family::V6 => "ip6tables-nft-save",
    };
    let printed = fresh.command(program, &[]);
    let lines = printed.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Returns rules, routes and ip rules. Empty built-in chains of iptables are omitted: it creates them at first use
/// and never removes them.
pub(crate) fn everything(fresh: &Fresh) -> String {
    let mut shown = String::new();
    for arguments in [
        "rule",
        "-6 rule",
        "route show table all",
        "-6 route show table all",
    ] {
        shown += &fresh.ip(arguments);
    }
    shown += &native(&fresh.nft("list ruleset"));
    for family in Family::ALL {
        for table in tables(&saved(fresh, family)) {
            shown += &format!("{family} {table}");
        }
    }
    shown
}

/// Returns tables that are not empty.
fn tables(saved: &str) -> Vec<String> {
    let parts = saved.split("COMMIT\n").filter_map(|part| {
        let lines: Vec<_> = part.lines().filter(|line| is_of_somebody(line)).collect();
        // More than the table's name.
        (lines.len() > 1).then(|| lines.join("\n") + "\n")
    });
    parts.collect()
}

/// Returns tables that nft created; iptables-nft's are read with its own program.
fn native(listed: &str) -> String {
    let (mut kept, mut shown) = (true, String::new());
    for line in listed.lines() {
        if line.starts_with("table ") {
            kept = !["raw {", "mangle {", "nat {"].iter().any(|name| {
                ["table ip ", "table ip6 "]
                    .iter()
                    .any(|family| line == format!("{family}{name}"))
            });
        }
        if kept {
            shown += line;
            shown.push('\n');
        }
    }
    shown
}

fn is_of_somebody(line: &str) -> bool {
    let is_own_chain = line.starts_with(':') && line.ends_with(" ACCEPT [0:0]");
    !is_own_chain
}
