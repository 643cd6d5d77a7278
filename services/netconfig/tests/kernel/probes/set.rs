//! The set's elements, and their owners.

use std::sync::Arc;

use netconfig::probes::ProbeSettings;

use crate::probes::place::{OnNode, POD};
use crate::support::Fresh;

const OTHER: &str = "10.9.0.7";

fn node() -> Arc<Fresh> {
    Arc::new(Fresh::new())
}

fn start(node: &Arc<Fresh>) -> OnNode {
    OnNode::start(node, ProbeSettings::default())
}

/// Returns what the tools show: addresses with owners, sorted.
pub(crate) fn shown(node: &Fresh) -> Vec<(String, String)> {
    let mut found = Vec::new();
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
    let node = node();
    let host = start(&node);
    assert!(host.set_addresses("c1", &POD));
    let wanted = owned(&[(POD[0], "c1"), (POD[1], "c1")]);
    assert_eq!(shown(&node), wanted);
    assert!(!host.set_addresses("c1", &POD));
    assert_eq!(shown(&node), wanted);
    assert_eq!(host.host.elements().get(), 2);
}

#[test]
fn before_a_pod_is_named_nothing_is_written() {
    let node = node();
    let host = start(&node);
    assert!(!host.set_addresses("c1", &[]));
    host.release("c1");
    assert_eq!(node.nft("list ruleset"), "");
    assert!(host.is_ok("probe-set"));
}

#[test]
fn addresses_that_are_no_longer_named_go_and_others_stay() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &POD);
    host.set_addresses("c2", &["10.9.0.8"]);
    assert!(host.set_addresses("c1", &[POD[0], OTHER]));
    let wanted = owned(&[(POD[0], "c1"), (OTHER, "c1"), ("10.9.0.8", "c2")]);
    assert_eq!(shown(&node), wanted);
    host.set_addresses("c1", &[]);
    assert_eq!(shown(&node), owned(&[("10.9.0.8", "c2")]));
}

#[test]
fn an_address_that_another_pod_got_is_never_taken_out_by_the_first_one() {
    let node = node();
    let host = start(&node);
    host.set_addresses("old", &POD);
    host.set_addresses("new", &POD);
    let wanted = owned(&[(POD[0], "new"), (POD[1], "new")]);
    assert_eq!(shown(&node), wanted);
    // The same if the old owner's rules are applied again, and after a restart, in either order.
    host.set_addresses("old", &POD);
    assert_eq!(shown(&node), wanted);
    let host = start(&node);
    host.set_addresses("old", &POD);
    host.set_addresses("new", &POD);
    host.release("old");
    assert_eq!(shown(&node), wanted);
    host.release("new");
    assert_eq!(shown(&node), []);
}

/// After another process's renaming, the kernel's name counts.
#[test]
fn an_element_that_bears_another_name_in_the_kernel_is_not_taken_out() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &[POD[0]]);
    node.nft(&format!(
        "delete element inet inpod-host probes-v4 {{ {a} }}; \
         add element inet inpod-host probes-v4 {{ {a} comment \"theirs\" }}",
        a = POD[0]
    ));
    host.release("c1");
    assert_eq!(shown(&node), [(POD[0].to_owned(), "theirs".to_owned())]);
}

#[test]
fn a_restart_reads_what_is_there_and_empties_nothing() {
    let node = node();
    start(&node).set_addresses("c1", &POD);
    let before = node.command("nft", &["-s", "list", "ruleset"]);
    let host = start(&node);
    assert_eq!(node.command("nft", &["-s", "list", "ruleset"]), before);
    assert_eq!(
        (host.host.elements().get(), host.host.restores().get()),
        (2, 0)
    );
    assert!(!host.set_addresses("c1", &POD));
    host.release("c1");
    assert_eq!(shown(&node), []);
}

#[test]
fn a_rule_of_another_setting_is_put_right_at_the_start_and_elements_stay() {
    let node = node();
    let other = ProbeSettings {
        probe_match: "uid:7".parse().unwrap(),
        ..ProbeSettings::default()
    };
    OnNode::start(&node, other).set_addresses("c1", &POD);
    let rules = |node: &Fresh| node.nft("list table inet inpod-host");
    let is_of_user = |text: &str| text.contains("skuid 7 ");
    assert!(is_of_user(&rules(&node)));
    let host = start(&node);
    let text = rules(&node);
    assert!(!is_of_user(&text), "{text}");
    assert!(text.contains("169.254.7.127"), "{text}");
    assert!(host.is_ok("probe-set"));
    assert_eq!(shown(&node), owned(&[(POD[0], "c1"), (POD[1], "c1")]));
}

/// `nft list`'s output can be loaded with the same meaning.
#[test]
fn what_nft_lists_of_the_table_can_be_loaded_again() {
    let node = node();
    let host = start(&node);
    host.set_addresses("c1", &POD);
    let listed = node.command("nft", &["-s", "list", "ruleset"]);
    assert!(listed.contains("meta skuid 0"), "{listed}");
    node.nft(&format!("flush ruleset\n{listed}"));
    assert_eq!(node.command("nft", &["-s", "list", "ruleset"]), listed);
    let host = start(&node);
    assert!(host.is_ok("probe-set"));
    assert_eq!(host.host.restores().get(), 0);
}

#[test]
fn a_thousand_pods_survive_a_flush() {
    let node = node();
    let host = start(&node);
    // 16 addresses for each of 63 sandboxes exceed one netlink message, and one sandbox's limit.
    let names: Vec<&'static str> = (0..63).map(|n| &*format!("c{n}").leak()).collect();
    for (n, name) in names.iter().enumerate() {
        let texts: Vec<_> = (0..16).map(|i| format!("fd0a::{n:x}:{i:x}")).collect();
        let texts: Vec<_> = texts.iter().map(String::as_str).collect();
        host.set_addresses(name, &texts);
    }
    let before = shown(&node);
    assert_eq!(before.len(), 63 * 16);
    node.nft("flush ruleset");
    host.set_addresses("one-more", &[POD[0]]);
    let after = shown(&node);
    assert_eq!(after.len(), 63 * 16 + 1);
    assert!(before.iter().all(|element| after.contains(element)));
}
