//! Every backend applies and removes every scenario.

use std::{fs, path::Path};

use inpod_types::SandboxRef;
use netconfig::{
    Backend, Family,
    apply::Phase,
    rules::{Redirection, scenarios},
};

use crate::backends::tools::{
    IPTABLES, RESTORE, applied, apply, detected, differences, everything, feed, restore, saved,
    untagged, writer,
};
use crate::support::{Fresh, ambient, sandbox};

#[test]
fn what_was_applied_is_there_and_applying_it_again_writes_nothing() {
    for backend in Backend::ALL {
        let fresh = Fresh::new();
        let first = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
        let first = first.unwrap();
        assert_eq!((first.changed, first.backend), (true, backend));
        assert_eq!(differences(backend, &fresh), [""; 0], "{backend}");
        let before = all_of_iptables(&fresh) + &everything(&fresh);
        let second = writer(backend).apply(&fresh.netns, &ambient(), &sandbox("c1"));
        let second = second.unwrap();
        assert_eq!(
            (second.changed, second.fingerprint),
            (false, first.fingerprint)
        );
        assert_eq!(
            all_of_iptables(&fresh) + &everything(&fresh),
            before,
            "{backend}"
        );
        let seen = writer(backend).observe(&fresh.netns).unwrap();
        assert_eq!((seen.intact, seen.backend), (true, Some(backend)));
        let tag = seen.tag.unwrap();
        assert_eq!(tag.fingerprint, first.fingerprint);
        assert_eq!(tag.sandbox, "net/c1/eth0");
    }
}

/// Returns iptables' state, to compare bytes.
fn all_of_iptables(fresh: &Fresh) -> String {
    let of = |backend| {
        Family::ALL
            .map(|family| saved(fresh, backend, family))
            .concat()
    };
    IPTABLES.map(of).concat()
}

#[test]
fn nothing_is_read_as_intact_where_anything_is_not_as_it_was_written() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        restore(
            &fresh,
            backend,
            Family::V6,
            "*nat\n-I INPOD_OUTPUT -j ACCEPT\nCOMMIT\n",
        );
        let seen = writer(backend).observe(&fresh.netns).unwrap();
        assert!(!seen.intact && seen.tag.is_some());
    }
}

fn recorded(name: &str, extension: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    fs::read_to_string(directory.join(format!("{name}.{extension}"))).unwrap_or_default()
}

/// Also applies each scenario after each other one: nothing stale may be left.
#[test]
fn iptables_lists_every_scenario_that_was_applied_as_it_lists_the_recorded_scripts() {
    for backend in IPTABLES {
        let ours = Fresh::new();
        for (name, redirection) in scenarios::redirections() {
            let applied = writer(backend).apply(&ours.netns, &redirection, &sandbox("c1"));
            assert!(applied.unwrap().changed, "{name}");
            let theirs = Fresh::new();
            for (family, extension) in [(Family::V4, "iptables"), (Family::V6, "ip6tables")] {
                restore(&theirs, backend, family, &recorded(&name, extension));
            }
            let listed = rules_of(&ours, backend);
            assert_ne!(untagged(&listed), listed);
            assert_eq!(
                untagged(&listed),
                untagged(&rules_of(&theirs, backend)),
                "{backend} {name}"
            );
        }
    }
}

/// Returns non-empty chains and rules in a fixed order of tables: iptables-legacy lists the last used table first.
fn rules_of(fresh: &Fresh, backend: Backend) -> String {
    let mut tables: Vec<String> = Vec::new();
    for family in Family::ALL {
        let text = saved(fresh, backend, family);
        let parts = text
            .split("COMMIT\n")
            .filter(|part| part.contains("INPOD_"));
        tables.extend(parts.map(|part| format!("{family} {part}")));
    }
    tables.sort();
    tables.concat()
}

#[test]
fn what_is_planned_is_what_is_done_and_after_it_nothing_is_planned() {
    for backend in IPTABLES {
        let (ours, theirs) = (Fresh::new(), Fresh::new());
        for (name, redirection) in scenarios::redirections() {
            let plan = |fresh: &Fresh| {
                let planned = writer(backend).preview(&fresh.netns, &redirection, &sandbox("c1"));
                planned.unwrap()
            };
            let planned = plan(&ours);
            assert_ne!(planned.verified.differences, [""; 0], "{name}");
            execute(&theirs, planned.transaction);
            let applied = writer(backend).apply(&ours.netns, &redirection, &sandbox("c1"));
            applied.unwrap();
            let after = plan(&ours);
            assert_eq!(after.verified.differences, [""; 0], "{name}");
            assert_eq!(after.transaction, "", "{name}");
            assert_eq!(
                rules_of(&theirs, backend),
                rules_of(&ours, backend),
                "{name}"
            );
            let routing = |fresh: &Fresh| fresh.ip("rule") + &fresh.ip("-6 route show table all");
            assert_eq!(routing(&theirs), routing(&ours), "{name}");
        }
    }
}

/// A line that names an iptables program is followed by its script, all others are commands.
fn execute(fresh: &Fresh, transaction: String) {
    fresh.run(move || {
        let (mut program, mut script) = (None::<String>, String::new());
        let flush = |program: &mut Option<String>, script: &mut String| {
            if let Some(program) = program.take() {
                feed(&program, &RESTORE, script);
                script.clear();
            }
        };
        for line in transaction.lines() {
            if let Some(named) = line.strip_prefix("# ") {
                flush(&mut program, &mut script);
                program = Some(named.strip_suffix(" --noflush").unwrap().to_owned());
            } else if ["sysctl ", "ip ", "conntrack "]
                .iter()
                .any(|known| line.starts_with(known))
            {
                flush(&mut program, &mut script);
                // conntrack fails without an entry to delete.
                feed(
                    "sh",
                    &[
                        "-c",
                        &format!("{line} >&2 || expr '{line}' : conntrack >&2"),
                    ],
                    "",
                );
            } else {
                script += &format!("{line}\n");
            }
        }
        flush(&mut program, &mut script);
    });
}

#[test]
fn a_last_removal_leaves_nothing_and_can_be_repeated() {
    for backend in Backend::ALL {
        let fresh = Fresh::new();
        let before = everything(&fresh);
        for (_, settings) in [
            scenarios::all().next().unwrap(),
            scenarios::all().last().unwrap(),
        ] {
            let redirection = Redirection::Ambient(settings);
            let applied = writer(backend).apply(&fresh.netns, &redirection, &sandbox("c1"));
            applied.unwrap();
            assert_ne!(everything(&fresh), before);
            for _ in 0..2 {
                let removed = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
                removed.unwrap();
                assert_eq!(everything(&fresh), before, "{backend}");
            }
        }
    }
}

/// The removing netconfig has another backend.
#[test]
fn a_removal_needs_not_be_told_the_backend() {
    for backend in Backend::ALL {
        let fresh = Fresh::new();
        let before = everything(&fresh);
        apply(backend, &fresh);
        for other in Backend::ALL {
            let removed = detected(other).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
            removed.unwrap();
            assert_eq!(everything(&fresh), before, "{backend} {other}");
        }
    }
}

#[test]
fn a_drain_replaces_capture_keeps_the_rest_and_can_be_repeated() {
    for backend in IPTABLES {
        let fresh = applied(backend);
        let of_table = |place: &str| {
            let tables = rules_of(&fresh, backend);
            let is_it = |part: &&str| part.contains(&format!("*{place}\n"));
            let tables: Vec<_> = tables.split("IPv").filter(is_it).collect();
            untagged(&tables.concat())
        };
        let before = of_table("mangle");
        for _ in 0..2 {
            let drained = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Drain);
            drained.unwrap();
            let nat = of_table("nat");
            assert!(!nat.contains("REDIRECT"), "{nat}");
            assert_eq!(
                nat.matches("-m conntrack --ctstate NEW\n").count(),
                4,
                "{nat}"
            );
            assert_eq!(of_table("mangle"), before);
        }
        assert!(apply(backend, &fresh));
        assert_eq!(differences(backend, &fresh), [""; 0]);
    }
}

#[test]
fn chains_and_rules_of_others_stay() {
    const THEIRS: &str = "*nat\n:THEIRS - [0:0]\n-A OUTPUT -p tcp -m tcp --dport 7 -j THEIRS\n\
        -A THEIRS -p tcp -j REDIRECT --to-ports 70\nCOMMIT\n\
        *filter\n:INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n\
        *mangle\n-A PREROUTING -p icmp -j MARK --set-xmark 0x7/0xff\n\
        -A PREROUTING -p ipv6-icmp -j MARK --set-xmark 0x8/0xff\nCOMMIT\n";
    for theirs in IPTABLES {
        for backend in Backend::ALL {
            let fresh = Fresh::new();
            for family in Family::ALL {
                restore(&fresh, theirs, family, THEIRS);
            }
            fresh.nft(
                "add table inet theirs { chain output { type nat hook output priority -100; }; }",
            );
            let before = everything(&fresh);
            assert!(before.contains("THEIRS") && before.contains(":INPUT DROP"));
            apply(backend, &fresh);
            assert_eq!(differences(backend, &fresh), [""; 0]);
            let foreign = saved(&fresh, theirs, Family::V4);
            assert!(
                foreign.contains("-A THEIRS -p tcp -j REDIRECT --to-ports 70"),
                "{foreign}"
            );
            let removed = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
            removed.unwrap();
            assert_eq!(everything(&fresh), before, "{theirs} {backend}");
        }
    }
}

#[test]
fn our_jump_comes_before_the_rules_of_others() {
    for backend in IPTABLES {
        let fresh = Fresh::new();
        restore(
            &fresh,
            backend,
            Family::V4,
            "*nat\n-A OUTPUT -p tcp -j ACCEPT\nCOMMIT\n",
        );
        apply(backend, &fresh);
        let saved = saved(&fresh, backend, Family::V4);
        let at = |rule: &str| saved.find(rule).unwrap();
        assert!(
            at("-j INPOD_OUTPUT") < at("-A OUTPUT -p tcp -j ACCEPT"),
            "{saved}"
        );
    }
}

/// An interface name in the tag may have any characters that the kernel allows.
#[test]
fn a_tag_with_quotes_and_backslashes_is_read_back() {
    for backend in IPTABLES {
        let fresh = Fresh::new();
        let odd = SandboxRef {
            container_id: "c".repeat(100).parse().unwrap(),
            ifname: r#"e"t'h\0"#.parse().unwrap(),
            ..sandbox("c1")
        };
        let applied = writer(backend).apply(&fresh.netns, &ambient(), &odd);
        assert!(applied.unwrap().changed);
        let seen = writer(backend).observe(&fresh.netns).unwrap();
        assert_eq!(seen.tag.unwrap().sandbox, odd.to_string());
        assert!(!apply(backend, &fresh));
    }
}

/// iptables writes IPv6 rules even if the kernel's IPv6 is disabled.
#[test]
fn a_netns_whose_ipv6_is_switched_off_has_rules_and_no_routes_of_it() {
    for backend in IPTABLES {
        let fresh = Fresh::new();
        fresh.run(|| fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1").unwrap());
        apply(backend, &fresh);
        assert_eq!(differences(backend, &fresh), [""; 0]);
        assert!(!fresh.ip("-6 rule").contains("32764"));
        assert!(saved(&fresh, backend, Family::V6).contains("-j INPOD_OUTPUT"));
        let removed = writer(backend).remove(&fresh.netns, &sandbox("c1"), Phase::Final);
        removed.unwrap();
    }
}
