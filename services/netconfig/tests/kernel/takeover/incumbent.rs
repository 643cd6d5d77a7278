//! Takes a pod over from Istio's node agent, in each form of its rules, and from an inpod that wrote iptables.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use netconfig::{Family, apply::Phase};

use crate::istio::{Form, restore};
use crate::support::{Fresh, ambient, plain, sandbox};
use crate::takeover::tools::{applied, apply, differences, everything, saved};

fn left_by_istio(form: Form) -> Fresh {
    let fresh = Fresh::new();
    crate::istio::leave(form, &fresh);
    fresh
}

fn remove(fresh: &Fresh) {
    let removed = plain().remove(&fresh.netns, &sandbox("c1"), Phase::Final);
    removed.unwrap();
}

#[test]
fn what_the_incumbent_left_is_replaced_and_afterwards_nothing_of_it_is_there() {
    for form in Form::ALL {
        let nothing = everything(&Fresh::new());
        let fresh = left_by_istio(form);
        let told = differences(&fresh).join("\n");
        assert!(
            told.contains("Istio's node agent left "),
            "{form:?}: {told}"
        );
        assert!(apply(&fresh));
        let after = everything(&fresh);
        assert!(!after.to_lowercase().contains("istio"), "{after}");
        assert_eq!(after, everything(&applied()), "{form:?}");
        assert_eq!(differences(&fresh), [""; 0]);
        remove(&fresh);
        assert_eq!(everything(&fresh), nothing, "{form:?}");
    }
}

/// The agent may write again after inpod did.
#[test]
fn what_the_incumbent_wrote_beside_our_rules_is_removed_and_ours_are_not_written_again() {
    for form in Form::ALL {
        let fresh = applied();
        let ours =
            |fresh: &Fresh| fresh.command("nft", &["-a", "list", "table", "inet", "inpod-nat"]);
        let before = ours(&fresh);
        crate::istio::restore_rules(form, &fresh);
        let planned = plain().preview(&fresh.netns, &ambient(), &sandbox("c1"));
        let transaction = planned.unwrap().transaction;
        assert!(!transaction.contains("inpod-nat"), "{transaction}");
        assert!(apply(&fresh), "{form:?}");
        assert_eq!(ours(&fresh), before, "{form:?}");
        assert_eq!(everything(&fresh), everything(&applied()), "{form:?}");
    }
}

#[test]
fn what_the_incumbent_left_is_removed_where_nothing_was_applied() {
    for form in Form::ALL {
        let nothing = everything(&Fresh::new());
        let fresh = left_by_istio(form);
        remove(&fresh);
        assert_eq!(everything(&fresh), nothing, "{form:?}");
    }
}

/// Some chains and jumps are missing; its tables contain foreign chains, a policy, and a jump from one of them.
#[test]
fn what_is_left_of_the_incumbent_is_removed_and_what_others_have_beside_it_stays() {
    let fresh = Fresh::new();
    let theirs = "*nat\n:THEIRS - [0:0]\n-A OUTPUT -p udp -j THEIRS\nCOMMIT\n\
        *mangle\n:FORWARD DROP [0:0]\nCOMMIT\n";
    restore(&fresh, [theirs, ""]);
    let before = everything(&fresh);
    let left = "*nat\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n\
        -A THEIRS -p tcp -g ISTIO_OUTPUT\n\
        -A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n*raw\n:ISTIO_PRERT - [0:0]\n\
        -A ISTIO_PRERT -j RETURN\nCOMMIT\n";
    restore(&fresh, [left, ""]);
    remove(&fresh);
    assert_eq!(everything(&fresh), before);
    assert!(fresh.nft("list table ip mangle").contains("policy drop"));
}

/// A verdict map refers to a chain, which the kernel therefore does not delete.
#[test]
fn a_chain_that_something_else_refers_to_is_emptied_and_no_longer_counts() {
    let fresh = Fresh::new();
    crate::istio::leave(Form::Iptables, &fresh);
    fresh.nft(
        "add map ip nat theirs { type inet_service : verdict; elements = { 9 : jump ISTIO_OUTPUT } }",
    );
    assert!(apply(&fresh));
    assert_eq!(differences(&fresh), [""; 0]);
    assert!(!apply(&fresh));
    let nat = fresh.nft("list table ip nat");
    assert!(nat.contains("chain ISTIO_OUTPUT {\n\t}"), "{nat}");
    assert!(!nat.contains("ISTIO_PRERT"), "{nat}");
    remove(&fresh);
    assert!(
        fresh
            .nft("list table ip nat")
            .contains("9 : jump ISTIO_OUTPUT")
    );
}

/// From istio-init's rules (services/docs/facts/istio-sidecar.md, 4.4.1).
#[test]
fn a_sidecars_chains_are_not_touched() {
    let fresh = Fresh::new();
    let sidecar = "*nat\n:ISTIO_INBOUND - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n\
        -A PREROUTING -p tcp -j ISTIO_INBOUND\n-A OUTPUT -j ISTIO_OUTPUT\n\
        -A ISTIO_OUTPUT -j ISTIO_REDIRECT\n-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";
    restore(&fresh, [sidecar, ""]);
    let before = saved(&fresh, Family::V4);
    assert!(apply(&fresh));
    remove(&fresh);
    assert_eq!(saved(&fresh, Family::V4), before);
}

/// As release 0.1 wrote them with a backend for iptables.
// scenario: 46
#[test]
fn rules_that_inpod_wrote_by_iptables_are_replaced_and_the_sysctl_is_switched_back_at_the_end() {
    let tag =
        "inpod schema=2 fingerprint=3717c2e820bb1348 switched=tcp_migrate_req sandbox=net/c1/eth0";
    let sysctl = "/proc/sys/net/ipv4/tcp_migrate_req";
    let nothing = everything(&Fresh::new());
    let fresh = Fresh::new();
    let rules = format!(
        "*nat\n:INPOD_OUTPUT - [0:0]\n-A OUTPUT -m comment --comment \"{tag}\" -j INPOD_OUTPUT\n\
         -A INPOD_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n"
    );
    restore(&fresh, [&rules, &rules]);
    fresh.run(move || std::fs::write(sysctl, "1").unwrap());
    let told = differences(&fresh).join("\n");
    assert!(
        told.contains("an earlier inpod left ip nat INPOD_OUTPUT"),
        "{told}"
    );
    assert!(apply(&fresh));
    assert_eq!(everything(&fresh), everything(&applied()));
    remove(&fresh);
    assert_eq!(everything(&fresh), nothing);
    let value = fresh.run(move || std::fs::read_to_string(sysctl).unwrap());
    assert_eq!(value, "0\n");
}

/// The kernel refuses a transaction that is based on an earlier state, and netconfig reads again.
#[test]
fn a_change_that_others_overtake_is_done_again() {
    for form in Form::ALL {
        let fresh = Fresh::new();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let disturb = || {
                let mut rounds = 0;
                while !is_over.load(Ordering::Relaxed) {
                    fresh.nft("add table inet theirs; delete table inet theirs");
                    rounds += 1;
                }
                rounds
            };
            let disturbing = scope.spawn(disturb);
            for _ in 0..20 {
                crate::istio::restore_rules(form, &fresh);
                assert!(apply(&fresh), "{form:?}");
                remove(&fresh);
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(disturbing.join().unwrap() > 5);
        });
        let listed = fresh.nft("list ruleset").to_lowercase();
        assert!(!listed.contains("istio"), "{listed}");
    }
}
