//! The set's elements, and their owners.

use std::sync::Arc;

use inpod_types::Reason;
use netconfig::{
    Family, Variant,
    probes::{ProbeSettings, RunError, Runner, SetBackendKind},
};

use crate::probes::place::{Kind, OnNode, POD, Programs};
use crate::support::Fresh;

const OTHER: &str = "10.9.0.7";

fn node() -> Arc<Fresh> {
    Arc::new(Fresh::new())
}

fn start(node: &Arc<Fresh>, kind: Kind) -> OnNode {
    OnNode::start(node, ProbeSettings::default(), kind)
}

/// Returns what the tools show: addresses with owners, sorted.
pub(crate) fn shown(node: &Fresh, kind: Kind) -> Vec<(String, String)> {
    let mut found = Vec::new();
    match kind {
        Kind::Nft => {
            for set in ["probes-v4", "probes-v6"] {
                let text = node.nft(&format!("list set inet inpod-host {set}"));
                let Some((_, elements)) = text.split_once("elements = {") else {
                    continue;
                };
                let elements = elements.split('}').next().unwrap().split(',');
                found.extend(elements.map(|element| {
                    let words: Vec<_> = element.split_whitespace().collect();
                    (words[0].to_owned(), unquoted(words.get(2)))
                }));
            }
        }
        Kind::IptablesNft | Kind::IptablesLegacy => {
            for line in node.command("ipset", &["save"]).lines() {
                let words: Vec<_> = line.split_whitespace().collect();
                if let ["add", _, address, ..] = words[..] {
                    found.push((address.to_owned(), unquoted(words.get(4))));
                }
            }
        }
    }
    found.sort();
    found
}

fn unquoted(word: Option<&&str>) -> String {
    word.map_or_else(String::new, |word| word.trim_matches('"').to_owned())
}

fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut pairs: Vec<_> = pairs
        .iter()
        .map(|(address, name)| ((*address).to_owned(), format!("net/{name}/eth0")))
        .collect();
    pairs.sort();
    pairs
}

#[test]
fn an_element_bears_the_sandboxs_name_and_naming_it_again_writes_nothing() {
    for kind in Kind::ALL {
        let node = node();
        let host = start(&node, kind);
        assert!(host.set_addresses("c1", &POD), "{kind:?}");
        let wanted = owned(&[(POD[0], "c1"), (POD[1], "c1")]);
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        assert!(!host.set_addresses("c1", &POD), "{kind:?}");
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        assert_eq!(host.host.elements(), 2);
    }
}

#[test]
fn before_a_pod_is_named_nothing_is_written() {
    for kind in Kind::ALL {
        let node = node();
        let host = start(&node, kind);
        assert!(!host.set_addresses("c1", &[]), "{kind:?}");
        host.release("c1");
        assert_eq!(node.nft("list ruleset"), "", "{kind:?}");
        assert_eq!(node.command("ipset", &["list", "-n"]), "", "{kind:?}");
        assert!(host.is_ok("probe-set"), "{kind:?}");
    }
}

#[test]
fn addresses_that_are_no_longer_named_go_and_others_stay() {
    for kind in Kind::ALL {
        let node = node();
        let host = start(&node, kind);
        host.set_addresses("c1", &POD);
        host.set_addresses("c2", &["10.9.0.8"]);
        assert!(host.set_addresses("c1", &[POD[0], OTHER]), "{kind:?}");
        let wanted = owned(&[(POD[0], "c1"), (OTHER, "c1"), ("10.9.0.8", "c2")]);
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        host.set_addresses("c1", &[]);
        assert_eq!(shown(&node, kind), owned(&[("10.9.0.8", "c2")]), "{kind:?}");
    }
}

#[test]
fn an_address_that_another_pod_got_is_never_taken_out_by_the_first_one() {
    for kind in Kind::ALL {
        let node = node();
        let host = start(&node, kind);
        host.set_addresses("old", &POD);
        host.set_addresses("new", &POD);
        let wanted = owned(&[(POD[0], "new"), (POD[1], "new")]);
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        // The same if the old owner's rules are applied again, and after a restart, in either order.
        host.set_addresses("old", &POD);
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        let host = start(&node, kind);
        host.set_addresses("old", &POD);
        host.set_addresses("new", &POD);
        host.release("old");
        assert_eq!(shown(&node, kind), wanted, "{kind:?}");
        host.release("new");
        assert_eq!(shown(&node, kind), [], "{kind:?}");
    }
}

/// After another process's renaming, the kernel's name counts.
#[test]
fn an_element_that_bears_another_name_in_the_kernel_is_not_taken_out() {
    let node = node();
    let host = start(&node, Kind::Nft);
    host.set_addresses("c1", &[POD[0]]);
    node.nft(&format!(
        "delete element inet inpod-host probes-v4 {{ {a} }}; \
         add element inet inpod-host probes-v4 {{ {a} comment \"theirs\" }}",
        a = POD[0]
    ));
    host.release("c1");
    assert_eq!(
        shown(&node, Kind::Nft),
        [(POD[0].to_owned(), "theirs".to_owned())]
    );
}

#[test]
fn a_restart_reads_what_is_there_and_empties_nothing() {
    for kind in Kind::ALL {
        let node = node();
        start(&node, kind).set_addresses("c1", &POD);
        let before = node.command("nft", &["-s", "list", "ruleset"]);
        let host = start(&node, kind);
        assert_eq!(
            node.command("nft", &["-s", "list", "ruleset"]),
            before,
            "{kind:?}"
        );
        assert_eq!(
            (host.host.elements(), host.host.restores()),
            (2, 0),
            "{kind:?}"
        );
        assert!(!host.set_addresses("c1", &POD), "{kind:?}");
        host.release("c1");
        assert_eq!(shown(&node, kind), [], "{kind:?}");
    }
}

#[test]
fn a_rule_of_another_setting_is_put_right_at_the_start_and_elements_stay() {
    for kind in Kind::ALL {
        let node = node();
        let other = ProbeSettings {
            probe_match: "uid:7".parse().unwrap(),
            ..ProbeSettings::default()
        };
        OnNode::start(&node, other, kind).set_addresses("c1", &POD);
        let rules = |node: &Fresh| match kind {
            Kind::Nft => node.nft("list table inet inpod-host"),
            Kind::IptablesNft => node.command("iptables-nft-save", &["-t", "nat"]),
            Kind::IptablesLegacy => node.command("iptables-legacy-save", &["-t", "nat"]),
        };
        let is_of_user = |text: &str| text.contains("skuid 7 ") || text.contains("--uid-owner 7 ");
        assert!(is_of_user(&rules(&node)), "{kind:?}");
        let host = start(&node, kind);
        let text = rules(&node);
        assert!(!is_of_user(&text), "{text}");
        assert!(text.contains("169.254.7.127"), "{text}");
        assert!(host.is_ok("probe-set"), "{kind:?}");
        assert_eq!(
            shown(&node, kind),
            owned(&[(POD[0], "c1"), (POD[1], "c1")]),
            "{kind:?}"
        );
    }
}

/// `nft list`'s output can be loaded with the same meaning.
#[test]
fn what_nft_lists_of_the_table_can_be_loaded_again() {
    let node = node();
    let host = start(&node, Kind::Nft);
    host.set_addresses("c1", &POD);
    let listed = node.command("nft", &["-s", "list", "ruleset"]);
    assert!(listed.contains("meta skuid != 4294967295"), "{listed}");
    node.nft(&format!("flush ruleset\n{listed}"));
    assert_eq!(node.command("nft", &["-s", "list", "ruleset"]), listed);
    let host = start(&node, Kind::Nft);
    assert!(host.is_ok("probe-set"));
    assert_eq!(host.host.restores(), 0);
}

#[test]
fn a_thousand_pods_survive_a_flush() {
    let node = node();
    let host = start(&node, Kind::Nft);
    // 16 addresses for each of 63 sandboxes exceed one netlink message, and one sandbox's limit.
    let names: Vec<&'static str> = (0..63).map(|n| &*format!("c{n}").leak()).collect();
    for (n, name) in names.iter().enumerate() {
        let texts: Vec<_> = (0..16).map(|i| format!("fd0a::{n:x}:{i:x}")).collect();
        let texts: Vec<_> = texts.iter().map(String::as_str).collect();
        host.set_addresses(name, &texts);
    }
    let before = shown(&node, Kind::Nft);
    assert_eq!(before.len(), 63 * 16);
    node.nft("flush ruleset");
    host.set_addresses("one-more", &[POD[0]]);
    let after = shown(&node, Kind::Nft);
    assert_eq!(after.len(), 63 * 16 + 1);
    assert!(before.iter().all(|element| after.contains(element)));
}

/// Programs of which one fails.
#[derive(Debug)]
struct Broken(Programs);

impl Runner for Broken {
    fn save(&self, family: Family) -> Result<String, RunError> {
        self.0.save(family)
    }

    fn restore(&self, _family: Family, _script: &str) -> Result<(), RunError> {
        Err(RunError {
            reason: Reason::BackendBusy,
            message: "iptables-restore did not end".to_owned(),
        })
    }
}

#[test]
fn what_could_not_be_named_wholly_is_not_named_at_all() {
    let node = node();
    let by = SetBackendKind::Iptables {
        variant: Variant::Nft,
        runner: Box::new(Broken(Programs("nft"))),
    };
    let host = OnNode::start_by(&node, ProbeSettings::default(), by);
    let error = host.try_name("c1", &POD).unwrap_err();
    assert!(
        error.contains("the node's probe rule: iptables-restore did not end"),
        "{error}"
    );
    assert_eq!(shown(&node, Kind::IptablesNft), []);
    assert_eq!(host.host.elements(), 0);
}
