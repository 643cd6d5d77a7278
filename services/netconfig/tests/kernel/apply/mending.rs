//! Differences from the applied rules are reported and repaired.

use netconfig::apply::Phase;

use crate::apply::{applied, is_reported_and_repaired, tag_of};
use crate::support::{Fresh, ambient, plain, sandbox};

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
    assert_eq!(rules, 14);
    for rule in 0..rules {
        let (table, chain, handle) = listed().swap_remove(rule);
        fresh.nft(&format!("delete rule inet {table} {chain} handle {handle}"));
        is_reported_and_repaired(&fresh, &format!("is missing in {table} {chain}"));
    }
}

#[test]
fn a_chain_a_table_a_route_and_an_ip_rule_that_is_deleted_is_told_and_mended() {
    let fresh = applied();
    fresh.nft("flush chain inet inpod-nat output; delete chain inet inpod-nat output");
    is_reported_and_repaired(&fresh, "chain inpod-nat output is missing");
    fresh.nft("delete table inet inpod-mangle");
    is_reported_and_repaired(&fresh, "table inpod-mangle is missing");
    fresh.nft("flush ruleset");
    is_reported_and_repaired(&fresh, "table inpod-nat is missing");
    for (family, name) in [("-4", "IPv4"), ("-6", "IPv6")] {
        fresh.ip(&format!("{family} rule del pref 500"));
        is_reported_and_repaired(&fresh, &format!("the {name} ip rule"));
        fresh.ip(&format!(
            "{family} route del local default dev lo table 10500"
        ));
        is_reported_and_repaired(&fresh, &format!("the {name} route"));
    }
}

#[test]
fn what_others_add_to_or_change_in_our_tables_is_told_and_mended() {
    let fresh = applied();
    fresh.nft("insert rule inet inpod-nat output limit rate 1/second accept");
    is_reported_and_repaired(
        &fresh,
        "rule `<limit> accept` is foreign in inpod-nat output",
    );
    fresh.nft("add chain inet inpod-nat theirs");
    is_reported_and_repaired(&fresh, "chain inpod-nat theirs is foreign");
    fresh.nft("add set inet inpod-nat theirs { type ipv4_addr; }");
    is_reported_and_repaired(&fresh, "holds 1 foreign sets or objects");
    fresh.nft("add chain inet inpod-mangle output { policy drop; }");
    is_reported_and_repaired(&fresh, "policy drop");
}

/// Two of the first release's rules stand for the rest.
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
    is_reported_and_repaired(&fresh, "table inpod-nat has schema 1, expected 2");
    plain()
        .remove(&fresh.netns, &sandbox("c1"), Phase::Final)
        .unwrap();
    assert_eq!(fresh.nft("list ruleset"), "");
}

/// Tables that are in sync are not written: counters in them go on.
#[test]
fn only_what_differs_is_written() {
    let fresh = applied();
    let handle = |fresh: &Fresh, table: &str| {
        let listed = fresh.command("nft", &["-a", "list", "table", "inet", table]);
        listed.lines().next().unwrap().to_owned()
    };
    let before = ["inpod-mangle", "inpod-nat"].map(|table| handle(&fresh, table));
    fresh.nft("flush chain inet inpod-nat output");
    let planned = plain().preview(&fresh.netns, &ambient(), &sandbox("c1"));
    let transaction = planned.unwrap().transaction;
    assert!(transaction.contains("inpod-nat"), "{transaction}");
    assert!(!transaction.contains("inpod-mangle"), "{transaction}");
    is_reported_and_repaired(&fresh, "is missing in inpod-nat output");
    let after = ["inpod-mangle", "inpod-nat"].map(|table| handle(&fresh, table));
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
}
