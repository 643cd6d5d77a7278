//! The end of claims.

use std::path::Path;

use crate::drift::{
    start,
    watcher::{Watcher, eventually, quiet},
};
use crate::harness::{Netconfig, at, pod_netns, wire};
use crate::name::Name;
use crate::support::Fresh;

/// The veth's other end is in netconfig's netns.
fn wired(netconfig: &Netconfig, host_side: &str) -> Fresh {
    let fresh = Fresh::new();
    let home = netconfig.netns();
    home.ip(&format!("link add {host_side} type veth peer name eth0"));
    let path = fresh.netns.path().display();
    home.ip(&format!("link set eth0 netns {path}"));
    fresh.ip("addr add 10.9.0.1/24 dev eth0");
    fresh.ip("link set eth0 up");
    fresh
}

fn has_link(netconfig: &Netconfig, name: &str) -> bool {
    netconfig
        .netns()
        .ip("-o link")
        .contains(&format!("{name}@"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_netns_ends_with_its_claim() {
    let mut netconfig = start(&["--sweep-seconds", "1"]).await;
    for (number, is_released) in [("1", true), ("2", false)] {
        let (name, host_side) = (format!("c{number}"), format!("host{number}"));
        let fresh = wired(&netconfig, &host_side);
        netconfig.claim(&name, &fresh).await.unwrap();
        netconfig.apply(&name).await;
        let (_, watcher) = Watcher::open(&mut netconfig).await;
        fresh.nft("flush ruleset");
        watcher.wait_for_states(&name, 1).await;
        assert!(has_link(&netconfig, &host_side));
        if is_released {
            assert!(netconfig.release(&name).await);
        }
        drop(fresh);
        let what = format!("the netns of {name} is kept");
        eventually(&what, async || !has_link(&netconfig, &host_side)).await;
        // The netns may end before that is reported.
        let what = format!("the end of {name} is reported");
        eventually(&what, async || watcher.ends() == [wire(&name)]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_changes_are_not_received_and_set_no_nsids() {
    let mut netconfig = start(&[]).await;
    let fresh = pod_netns();
    netconfig.claim("c1", &fresh).await.unwrap();
    netconfig.apply("c1").await;
    let (_, watcher) = Watcher::open(&mut netconfig).await;
    netconfig.netns().nft("add table inet theirs");
    fresh.nft("flush ruleset");
    watcher.wait_for_states("c1", 1).await;
    quiet().await;
    let others = "drift_events_total{netns=\"other\"}";
    assert_eq!(netconfig.metric(others).await, 0);
    assert_eq!(netconfig.netns().ip("netns list-id"), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_netns_is_ignored_and_a_reused_nsid_is_the_new_claims() {
    let mut netconfig = start(&[]).await;
    let (kept, gone) = (pod_netns(), wired(&netconfig, "gone"));
    for (name, fresh) in [("kept", &kept), ("gone", &gone)] {
        netconfig.claim(name, fresh).await.unwrap();
        netconfig.apply(name).await;
        netconfig.release(name).await;
    }
    // The kernel frees the nsid before the link, and gives the lowest free nsid next.
    drop(gone);
    let is_gone = async || !has_link(&netconfig, "gone");
    eventually("the netns is kept", is_gone).await;
    let next = pod_netns();
    netconfig.claim("next", &next).await.unwrap();
    netconfig.apply("next").await;
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert_eq!((first.len(), first[0].intact), (1, true));
    kept.nft("flush ruleset");
    next.nft("flush ruleset");
    assert!(!watcher.wait_for_states("next", 1).await.intact);
    // A netns keeps its nsid, whichever sandbox claims it.
    netconfig.claim("again", &kept).await.unwrap();
    netconfig.apply("again").await;
    assert!(watcher.wait_for_states("again", 1).await.intact);
    kept.nft("flush ruleset");
    assert!(!watcher.wait_for_states("again", 2).await.intact);
    assert_eq!(watcher.count(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_name_is_deleted_renamed_or_replaced_ends() {
    // No sweep is due.
    let mut netconfig = start(&["--sweep-seconds", "3600"]).await;
    let words = ["deleted", "renamed", "replaced", "stays"];
    let mut pods = Vec::new();
    for word in words {
        let fresh = pod_netns();
        let name = Name::new(&fresh, &format!("drift-{word}"));
        netconfig
            .claim_at(word, at(&name.0), &["10.9.0.1"])
            .await
            .unwrap();
        pods.push((fresh, name));
    }
    let (first, watcher) = Watcher::open(&mut netconfig).await;
    assert_eq!(first.len(), words.len());
    for (word, (_, name)) in words.into_iter().zip(&pods) {
        let (path, aside) = (Path::new(&name.0), format!("{}-aside", name.0));
        // Mount points can neither be renamed nor replaced.
        if word != "stays" {
            name.unmount();
        }
        match word {
            "deleted" => std::fs::remove_file(path).unwrap(),
            "renamed" => {
                std::fs::rename(path, &aside).unwrap();
                std::fs::remove_file(aside).unwrap();
            }
            "replaced" => {
                std::fs::write(&aside, "").unwrap();
                std::fs::rename(aside, path).unwrap();
            }
            _ => continue,
        }
        let what = format!("{word} is held");
        eventually(&what, async || watcher.ends().contains(&wire(word))).await;
    }
    assert_eq!(netconfig.claims().await, ["net/stays/eth0"]);
}
