//! An operator can save and load the rules of a pod, and earlier releases' longer tags are read.

use std::io::Write as _;

use inpod_types::SandboxRef;

use crate::apply::differences;
use crate::support::{Fresh, ambient, plain};

/// Has the longest name that earlier releases wrote in full, and an id as long as those of Kubernetes' runtimes.
fn longest() -> SandboxRef {
    SandboxRef {
        network_name: "n".repeat(79).parse().unwrap(),
        container_id: "c".repeat(64).parse().unwrap(),
        ifname: "i".repeat(15).parse().unwrap(),
    }
}

fn applied() -> Fresh {
    let fresh = Fresh::new();
    let applied = plain().apply(&fresh.netns, &ambient(), &longest());
    assert!(applied.unwrap().changed);
    fresh
}

fn saved(fresh: &Fresh) -> String {
    fresh.command("nft", &["-s", "list", "ruleset"])
}

fn load(fresh: &Fresh, rules: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(rules.as_bytes()).unwrap();
    fresh.command("nft", &["-f", file.path().to_str().unwrap()]);
}

fn is_in_sync(fresh: &Fresh) {
    assert_eq!(differences(fresh), [""; 0]);
    assert!(plain().observe(&fresh.netns).unwrap().intact);
    let applied = plain().apply(&fresh.netns, &ambient(), &longest());
    assert!(!applied.unwrap().changed);
}

#[test]
fn saved_rules_of_the_longest_sandbox_are_loaded_again() {
    let fresh = applied();
    let rules = saved(&fresh);
    let scratch = Fresh::new();
    load(&scratch, &rules);
    assert_eq!(saved(&scratch), rules);
    load(&fresh, &format!("flush ruleset\n{rules}"));
    is_in_sync(&fresh);
}

/// Earlier releases wrote the whole name of a sandbox of up to 160 bytes.
#[test]
fn rules_with_the_tag_of_an_earlier_release_are_in_sync() {
    let fresh = applied();
    let rules = saved(&fresh);
    let (start, _) = rules.split_once(" sandbox=").unwrap();
    let (_, tag) = start.rsplit_once("comment \"").unwrap();
    let fingerprint = tag.split(' ').nth(2).unwrap();
    // nft loads at most 128 bytes.
    let earlier = format!(
        "inpod schema=2 {fingerprint} sandbox=net/{}/eth0",
        "c".repeat(64)
    );
    let current = plain().observe(&fresh.netns).unwrap().tag.unwrap();
    assert!(!earlier.ends_with(&current.sandbox));
    let rules = rules.replace(&current.to_string(), &earlier);
    load(&fresh, &format!("flush ruleset\n{rules}"));
    is_in_sync(&fresh);
    // Nothing has written the tag again.
    assert!(saved(&fresh).contains(&earlier));
}
