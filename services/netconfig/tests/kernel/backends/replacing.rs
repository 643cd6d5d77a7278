//! One backend replaces another exactly if that is configured.

use netconfig::{Backend, apply::Phase, rules::Redirection, rules::scenarios};

use crate::backends::tools::{applied, detected, differences, everything, writer};
use crate::support::{Fresh, ambient, sandbox};

// scenario: 46
#[test]
fn a_configured_backend_takes_the_place_of_every_other_one() {
    for to in Backend::ALL {
        let alone = everything(&applied(to));
        for from in Backend::ALL.into_iter().filter(|from| *from != to) {
            let fresh = Fresh::new();
            let nothing = everything(&fresh);
            let first = writer(from).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert_eq!(first.unwrap().backend, from);
            let reported = differences(to, &fresh);
            let named = format!("rules of inpod are left in {from}");
            assert!(reported.contains(&named), "{reported:?}");
            let second = writer(to).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            let second = second.unwrap();
            assert_eq!((second.changed, second.backend), (true, to));
            assert_eq!(everything(&fresh), alone, "{from} {to}");
            assert_eq!(differences(to, &fresh), [""; 0]);
            let removed = writer(to).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
            removed.unwrap();
            assert_eq!(everything(&fresh), nothing, "{from} {to}");
        }
    }
}

// scenario: 46
#[test]
fn a_pod_keeps_its_backend_where_none_is_configured() {
    for from in Backend::ALL {
        for to in Backend::ALL {
            let fresh = applied(from);
            let before = everything(&fresh);
            let again = detected(to).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            let again = again.unwrap();
            assert_eq!((again.changed, again.backend), (false, from), "{to}");
            assert_eq!(everything(&fresh), before);
            let (_, other) = scenarios::all().last().unwrap();
            let toggled =
                detected(to).apply(&fresh.netns, &Redirection::Ambient(other), &sandbox("c1"));
            assert_eq!(toggled.unwrap().backend, from, "{to}");
            let seen = detected(to).observe(&fresh.netns).unwrap();
            assert_eq!((seen.backend, seen.intact), (Some(from), true));
        }
    }
}

/// netconfig was stopped in the middle.
// scenario: 46
#[test]
fn rules_in_two_backends_become_those_of_one() {
    for to in Backend::ALL {
        let alone = everything(&applied(to));
        for other in Backend::ALL.into_iter().filter(|other| *other != to) {
            let fresh = applied(to);
            let before = Fresh::new();
            writer(other)
                .apply(&before.netns, &ambient(), &sandbox("c1"))
                .unwrap();
            copy(&before, &fresh, other);
            assert_ne!(everything(&fresh), alone);
            let applied = writer(to).apply(&fresh.netns, &ambient(), &sandbox("c1"));
            assert!(applied.unwrap().changed);
            assert_eq!(everything(&fresh), alone, "{other} {to}");
        }
    }
}

fn copy(from: &Fresh, to: &Fresh, backend: Backend) {
    use netconfig::Family;

    use crate::backends::tools::{IPTABLES, feed, restore, saved};
    if IPTABLES.contains(&backend) {
        for family in Family::ALL {
            restore(to, backend, family, &saved(from, backend, family));
        }
    } else {
        let listed = from.nft("list ruleset");
        to.run(move || feed("nft", &["-f", "-"], &listed));
    }
}
