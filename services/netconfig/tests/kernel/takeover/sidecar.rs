//! A sidecar's redirection: repaired, changed, removed, and taken over from Istio's sidecar installer in each form of
//! its rules.

use std::net::TcpListener;

use netconfig::{apply::Phase, rules::Redirection};

use crate::istio::Form;
use crate::istio_sidecar::Left;
use crate::scenarios;
use crate::support::{Fresh, ambient, plain, sandbox};
use crate::takeover::tools::everything;

fn scenario(name: &str) -> Redirection {
    let mut all = scenarios::sidecar::all();
    let (_, settings) = all.find(|(found, _)| *found == name).unwrap();
    Redirection::Sidecar(settings)
}

/// Needs everything: rules of all tables, routes, ip rules, the address.
fn by_tproxy() -> Redirection {
    scenario("everything-tproxy")
}

fn apply(fresh: &Fresh, redirection: &Redirection) -> bool {
    let applied = plain().apply(&fresh.netns, redirection, &sandbox("c1"));
    applied.unwrap().changed
}

fn differences(fresh: &Fresh, redirection: &Redirection) -> Vec<String> {
    let verified = plain().verify(&fresh.netns, redirection);
    verified.unwrap().differences
}

fn remove(fresh: &Fresh, phase: Phase) {
    let removed = plain().remove(&fresh.netns, &sandbox("c1"), phase);
    removed.unwrap();
}

/// Includes addresses, which [`everything`] shows only by their routes.
fn all(fresh: &Fresh) -> String {
    let addresses = fresh.ip("-6 -o addr show dev lo");
    let words = addresses
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3));
    let addresses: Vec<_> = words.collect();
    format!("{addresses:?}\n{}", routed(fresh))
}

/// The route of an IPv6 address follows the address a moment later.
fn routed(fresh: &Fresh) -> String {
    let shown = everything(fresh);
    let lines = shown
        .lines()
        .filter(|line| !line.contains("local ::6 dev lo"));
    lines.map(|line| format!("{line}\n")).collect()
}

fn applied(redirection: &Redirection) -> Fresh {
    let fresh = Fresh::new();
    assert!(apply(&fresh, redirection));
    fresh
}

#[test]
fn what_istios_sidecar_installer_left_is_replaced_and_afterwards_nothing_of_it_is_there() {
    for left in Left::ALL {
        let ours = match left {
            Left::Redirect => scenario("dns"),
            Left::Tproxy => by_tproxy(),
        };
        for form in Form::ALL {
            let nothing = all(&Fresh::new());
            let fresh = Fresh::new();
            crate::istio_sidecar::leave(form, left, &fresh);
            let reported = differences(&fresh, &ours).join("\n");
            let is_reported = reported.contains("Istio's sidecar installer left ");
            assert!(is_reported, "{left:?} in {form:?}: {reported}");
            assert!(apply(&fresh, &ours));
            let after = all(&fresh);
            // Except for an interface name that our rules contain.
            let named = after.to_lowercase().replace("not-istio-nic", "");
            assert!(!named.contains("istio"), "{after}");
            assert_eq!(after, all(&applied(&ours)), "{left:?} {form:?}");
            assert_eq!(differences(&fresh, &ours), [""; 0]);
            assert!(!apply(&fresh, &ours));
            remove(&fresh, Phase::Final);
            assert_eq!(all(&fresh), nothing, "{left:?} {form:?}");
        }
    }
}

#[test]
fn ambient_mode_leaves_alone_what_istios_sidecar_installer_left() {
    for left in Left::ALL {
        for form in Form::ALL {
            let fresh = Fresh::new();
            crate::istio_sidecar::leave(form, left, &fresh);
            let before = all(&fresh);
            assert!(apply(&fresh, &ambient()));
            assert_eq!(differences(&fresh, &ambient()), [""; 0]);
            for phase in [Phase::Drain, Phase::Final] {
                remove(&fresh, phase);
            }
            assert_eq!(all(&fresh), before, "{left:?} {form:?}");
        }
    }
}

/// Only the ip rules are left.
#[test]
fn ip_rules_that_istios_sidecar_installer_left_alone_are_replaced() {
    let fresh = Fresh::new();
    for _ in 0..3 {
        fresh.ip("rule add fwmark 1337 lookup 133");
    }
    fresh.ip("rule add fwmark 1337/0xffff lookup 133");
    let ours = by_tproxy();
    let reported = differences(&fresh, &ours);
    let left = reported
        .iter()
        .filter(|reported| reported.contains("fwmark 0x539"));
    assert_eq!(left.count(), 3, "{reported:?}");
    assert!(apply(&fresh, &ours));
    let rules = fresh.ip("rule");
    assert_eq!(rules.matches("lookup 133").count(), 1, "{rules}");
    assert!(rules.contains("fwmark 0x539/0xffff lookup 133"), "{rules}");
    assert_eq!(differences(&fresh, &ours), [""; 0]);
}

#[test]
fn a_drain_of_a_sidecars_redirection_leaves_nothing() {
    for phase in [Phase::Drain, Phase::Final] {
        let nothing = all(&Fresh::new());
        let fresh = applied(&by_tproxy());
        for _ in 0..2 {
            remove(&fresh, phase);
            assert_eq!(all(&fresh), nothing, "{phase:?}");
        }
    }
}

#[test]
fn a_pod_goes_from_one_mode_to_the_other_and_nothing_stale_is_left() {
    let forms = [
        ambient(),
        scenario("basic"),
        by_tproxy(),
        scenario("ipv4-alone-tproxy"),
    ];
    let alone = forms.each_ref().map(|form| all(&applied(form)));
    for (from, _) in forms.iter().zip(&alone) {
        for (to, alone) in forms.iter().zip(&alone) {
            let fresh = applied(from);
            assert_eq!(apply(&fresh, to), from != to);
            assert_eq!(&all(&fresh), alone);
            assert_eq!(differences(&fresh, to), [""; 0]);
            let seen = plain().observe(&fresh.netns).unwrap();
            assert!(seen.intact);
        }
    }
}

fn is_reported_and_repaired(fresh: &Fresh, named: &str) {
    let ours = by_tproxy();
    let reported = differences(fresh, &ours);
    let is_named = reported.iter().any(|sentence| sentence.contains(named));
    assert!(is_named, "{named}: {reported:?}");
    let seen = plain().observe(&fresh.netns).unwrap();
    assert!(!seen.intact && seen.tag.is_some(), "{named}");
    assert!(apply(fresh, &ours));
    assert_eq!(differences(fresh, &ours), [""; 0]);
}

#[test]
fn an_address_a_route_and_an_ip_rule_that_is_deleted_is_reported_and_mended() {
    let fresh = applied(&by_tproxy());
    fresh.ip("-6 addr del ::6/128 dev lo");
    is_reported_and_repaired(&fresh, "the IPv6 address `::6/128 dev lo` is missing");
    for (family, name) in [("-4", "IPv4"), ("-6", "IPv6")] {
        fresh.ip(&format!("{family} rule del pref 500"));
        is_reported_and_repaired(&fresh, &format!("the {name} ip rule"));
        fresh.ip(&format!(
            "{family} route del local default dev lo table 10501"
        ));
        is_reported_and_repaired(&fresh, &format!("the {name} route"));
    }
}

#[test]
fn every_single_rule_that_is_deleted_is_reported_and_mended() {
    let fresh = applied(&by_tproxy());
    let listed = || fresh.command("nft", &["-a", "list", "ruleset"]);
    let chains: Vec<(String, String)> = Redirection::ruleset(&by_tproxy())
        .tables
        .into_iter()
        .flat_map(|table| {
            let name = table.name;
            let chains = table.chains.into_iter();
            chains.map(move |chain| (name.clone(), chain.name))
        })
        .collect();
    let mut count = 0;
    for (table, chain) in &chains {
        let rules = |listed: &str| -> Vec<String> {
            let (_, of_table) = listed
                .split_once(&format!("table inet {table} {{"))
                .unwrap();
            let (_, of_chain) = of_table.split_once(&format!("chain {chain} {{")).unwrap();
            let (of_chain, _) = of_chain.split_once("\n\t}").unwrap();
            let lines = of_chain.lines().filter(|line| line.contains(" counter "));
            let handle = lines.filter_map(|line| line.rsplit(' ').next());
            handle.map(str::to_owned).collect()
        };
        for at in 0..rules(&listed()).len() {
            let handle = rules(&listed()).swap_remove(at);
            fresh.nft(&format!("delete rule inet {table} {chain} handle {handle}"));
            let named = format!("is missing in {table} {chain}");
            is_reported_and_repaired(&fresh, &named);
            count += 1;
        }
    }
    let wanted = Redirection::ruleset(&by_tproxy()).tables;
    let wanted = wanted.iter().flat_map(|table| &table.chains);
    assert_eq!(count, wanted.map(|chain| chain.rules.len()).sum::<usize>());
}

/// A kernel worker adds the address's route; an apply must wait for it.
#[test]
fn what_was_applied_is_as_it_belongs_and_can_be_used_at_once_two_hundred_times() {
    let (fresh, ours) = (Fresh::new(), scenario("basic"));
    for round in 0..200 {
        assert!(apply(&fresh, &ours), "{round}");
        let reported = differences(&fresh, &ours);
        let bound = fresh.run(|| TcpListener::bind("[::6]:0").map(drop));
        assert!(bound.is_ok(), "{round}: {bound:?}");
        assert_eq!(reported, [""; 0], "{round}");
        let before = everything(&fresh);
        assert!(before.contains("local ::6 dev lo"), "{round}: {before}");
        remove(&fresh, Phase::Final);
    }
}

/// An address from before is not removed.
#[test]
fn an_address_of_others_is_used_and_not_taken_away() {
    let fresh = Fresh::new();
    fresh.ip("-6 addr add ::6/128 dev lo");
    let before = all(&fresh);
    assert!(apply(&fresh, &scenario("basic")));
    assert_eq!(differences(&fresh, &scenario("basic")), [""; 0]);
    remove(&fresh, Phase::Final);
    assert_eq!(all(&fresh), before);
}
