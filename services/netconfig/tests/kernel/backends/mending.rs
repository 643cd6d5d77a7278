//! Missing, moved and extra rules are reported and repaired.

use std::collections::BTreeSet;

use netconfig::Family;

use crate::backends::tools::{
    IPTABLES, applied, apply, detected, differences, everything, is_reported_and_repaired, restore,
    saved,
};
use crate::support::Fresh;
use netconfig::Backend;

/// Returns our rules and all jumps to them: the table, and the text after `-A`.
fn rules(fresh: &Fresh, backend: Backend, family: Family) -> BTreeSet<(String, String)> {
    let (mut table, mut found) = (String::new(), BTreeSet::new());
    for line in saved(fresh, backend, family).lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name.to_owned();
        }
        if let Some(rule) = line.strip_prefix("-A ") {
            found.insert((table.clone(), rule.to_owned()));
        }
    }
    found
}

fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

#[test]
fn every_single_rule_and_jump_that_is_deleted_is_told_and_mended() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        let before = everything(&fresh);
        for family in Family::ALL {
            let all = rules(&fresh, backend, family);
            assert_eq!(all.len(), 10, "{all:?}");
            for (table, rule) in all {
                let script = format!("*{table}\n-D {rule}\nCOMMIT\n");
                restore(&fresh, backend, family, &script);
                let family = family_name(family);
                let (chain, rest) = rule.split_once(' ').unwrap();
                let chain = chain.strip_prefix("INPOD_").unwrap_or(chain).to_lowercase();
                let named = if rest.contains("-j INPOD_") {
                    format!("chain {family} inpod-{table} {chain} is no base chain")
                } else {
                    format!("is missing in {family} inpod-{table} {chain}")
                };
                is_reported_and_repaired(backend, &fresh, &named);
            }
        }
        assert_eq!(everything(&fresh), before);
    }
}

#[test]
fn a_chain_or_a_table_that_is_deleted_is_told_and_mended() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        for family in Family::ALL {
            let name = family_name(family);
            let all = rules(&fresh, backend, family);
            let jump = |table: &str| {
                let mut jumps = all.iter().filter(|(place, _)| place == table);
                let (_, jump) = jumps
                    .find(|(_, rule)| rule.ends_with("-j INPOD_OUTPUT"))
                    .unwrap();
                format!("-D {jump}")
            };
            let gone = |table: &str| {
                let jump = jump(table);
                format!("*{table}\n{jump}\n-F INPOD_OUTPUT\n-X INPOD_OUTPUT\nCOMMIT\n")
            };
            restore(&fresh, backend, family, &gone("nat"));
            is_reported_and_repaired(
                backend,
                &fresh,
                &format!("chain {name} inpod-nat output is missing"),
            );
            let flushed = "*mangle\n-F\n-X\nCOMMIT\n";
            restore(&fresh, backend, family, flushed);
            is_reported_and_repaired(
                backend,
                &fresh,
                &format!("table {name} inpod-mangle is missing"),
            );
        }
    }
}

#[test]
fn what_others_add_to_our_chains_is_told_and_mended() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        let before = everything(&fresh);
        for (script, named) in [
            (
                "*nat\n-I INPOD_OUTPUT -m limit --limit 1/sec -j ACCEPT\nCOMMIT\n",
                "rule `<-m limit --limit 1/sec> <-j ACCEPT>` is foreign in ip inpod-nat output",
            ),
            (
                "*nat\n:INPOD_THEIRS - [0:0]\n-A INPOD_THEIRS -j RETURN\n-A INPOD_OUTPUT -j INPOD_THEIRS\nCOMMIT\n",
                "chain ip inpod-nat INPOD_THEIRS is foreign",
            ),
            (
                "*mangle\n-A INPUT -j INPOD_OUTPUT\nCOMMIT\n",
                "chain ip inpod-mangle output is no base chain",
            ),
            (
                "*mangle\n-A INPUT -j INPOD_OUTPUT\nCOMMIT\n",
                "table ip inpod-mangle holds 2 foreign sets or objects",
            ),
            (
                "*raw\n:INPOD_OUTPUT - [0:0]\nCOMMIT\n",
                "table ip inpod-raw is left over",
            ),
        ] {
            restore(&fresh, backend, Family::V4, script);
            is_reported_and_repaired(backend, &fresh, named);
            assert_eq!(everything(&fresh), before, "{script}");
        }
    }
}

/// Tables that are in sync are not written.
#[test]
fn only_what_differs_is_written() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        // A rewritten table resets this counter.
        let counted = "*mangle\n[7:700] -A PREROUTING -p icmp -j RETURN\nCOMMIT\n".to_owned();
        let program = crate::backends::tools::program(backend, Family::V4, "restore");
        fresh.run(move || crate::backends::tools::feed(program, &["--noflush", "-c"], &counted));
        restore(
            &fresh,
            backend,
            Family::V4,
            "*nat\n-F INPOD_OUTPUT\nCOMMIT\n",
        );
        let planned = detected(backend).preview(
            &fresh.netns,
            &crate::support::ambient(),
            &crate::support::sandbox("c1"),
        );
        let transaction = planned.unwrap().transaction;
        assert!(transaction.contains("*nat\n"), "{transaction}");
        assert!(!transaction.contains("*mangle\n"), "{transaction}");
        assert!(!transaction.contains("ip6tables"), "{transaction}");
        assert!(apply(backend, &fresh));
        assert_eq!(differences(backend, &fresh), [""; 0]);
    }
}
