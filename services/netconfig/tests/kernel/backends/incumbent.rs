//! Takes a pod over from Istio's node agent, in each of the three forms of its rules.

use netconfig::{Backend, Family, apply::Phase};

use crate::backends::tools::{applied, differences, everything, restore, saved, writer};
use crate::support::{Fresh, ambient, sandbox};

fn left_by_istio(form: Backend) -> Fresh {
    let fresh = Fresh::new();
    crate::istio::leave(form, &fresh);
    fresh
}

#[test]
fn what_the_incumbent_left_is_replaced_and_afterwards_nothing_of_it_is_there() {
    for form in Backend::ALL {
        for backend in Backend::ALL {
            let nothing = everything(&Fresh::new());
            let fresh = left_by_istio(form);
            let told = differences(backend, &fresh).join("\n");
            let named = format!("left in {form}");
            let left =
                told.contains("Istio's node agent left") && told.contains(&format!(" in {form}"));
            assert!(left, "{named}: {told}");
            let applied_now = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert!(applied_now.unwrap().changed);
            let after = everything(&fresh);
            assert!(!after.to_lowercase().contains("istio"), "{after}");
            assert_eq!(after, everything(&applied(backend)), "{form} {backend}");
            assert_eq!(differences(backend, &fresh), [""; 0]);
            let removed = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
            removed.unwrap();
            assert_eq!(everything(&fresh), nothing, "{form} {backend}");
        }
    }
}

#[test]
fn what_the_incumbent_left_is_removed_where_nothing_was_applied() {
    for form in Backend::ALL {
        let nothing = everything(&Fresh::new());
        let fresh = left_by_istio(form);
        let removed = writer(Backend::Nftables).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        assert_eq!(everything(&fresh), nothing, "{form}");
    }
}

/// Some chains and jumps are missing; its tables contain foreign chains.
#[test]
fn what_is_left_of_the_incumbent_is_removed_and_chains_of_others_beside_it_stay() {
    for form in crate::backends::tools::IPTABLES {
        let fresh = Fresh::new();
        let theirs = "*nat\n:THEIRS - [0:0]\n-A OUTPUT -p udp -j THEIRS\nCOMMIT\n";
        restore(&fresh, form, Family::V4, theirs);
        let before = everything(&fresh);
        let left = "*nat\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n\
            -A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n*raw\n:ISTIO_PRERT - [0:0]\nCOMMIT\n";
        restore(&fresh, form, Family::V4, left);
        let removed = writer(form).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        assert_eq!(everything(&fresh), before);
    }
}

/// From istio-init's rules (services/docs/facts/istio-sidecar.md, 4.4.1).
#[test]
fn a_sidecars_chains_are_not_touched() {
    for form in crate::backends::tools::IPTABLES {
        let fresh = Fresh::new();
        let sidecar = "*nat\n:ISTIO_INBOUND - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n\
            -A PREROUTING -p tcp -j ISTIO_INBOUND\n-A OUTPUT -j ISTIO_OUTPUT\n\
            -A ISTIO_OUTPUT -j ISTIO_REDIRECT\n-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";
        restore(&fresh, form, Family::V4, sidecar);
        let before = saved(&fresh, form, Family::V4);
        for backend in Backend::ALL {
            let applied = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert!(applied.unwrap().changed);
        }
        let removed = writer(form).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
        let after = saved(&fresh, form, Family::V4);
        let rules = |saved: &str| -> Vec<String> {
            let rules = saved.lines().filter(|line| line.starts_with("-A"));
            rules.map(str::to_owned).collect()
        };
        assert_eq!(rules(&after), rules(&before));
    }
}
