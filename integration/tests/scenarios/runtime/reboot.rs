//! A power cut: memory is gone, the disk remains.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::ensure;
use integration::{Node, Pod, SERVICES, Spec, TIMEOUT, eventually};
use nix::sys::signal::Signal;

use crate::runtime::{
    chain::{spooled, within},
    containerd::{BOOT_ID, Runtime},
    failures::{assert_error, enrol_shop},
    recorder::{Recorded, record, recorded},
    sandboxes::in_the_mesh,
};

/// Starts the services with a new boot id.
fn start(node: &Node, boot: &Path) {
    let script = format!("mount --bind {} {BOOT_ID} && exec \"$@\"", boot.display());
    let within = [
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-c",
        &script,
        "sh",
    ];
    for service in SERVICES {
        node.start_within(&within, &node.run_dir(), service, &["--peer", "uid"])
            .unwrap();
    }
    node.start_ztunnel(&[]).unwrap();
}

/// Ends everything powered and deletes what memory kept.
fn cut_power(runtime: &mut Runtime, pods: &[Pod]) {
    runtime.cut_power();
    let node = &runtime.node;
    for process in SERVICES.into_iter().chain(["ztunnel"]) {
        node.stop(process, Signal::SIGKILL).unwrap();
    }
    fs::remove_dir_all(node.run_dir()).unwrap();
    fs::remove_dir_all(runtime.dir.join("state")).unwrap();
    pods.iter().for_each(|pod| pod.unmount().unwrap());
    for command in [
        &["ip", "link", "del", "cni0"][..],
        &["nft", "flush", "ruleset"],
    ] {
        within(node.netns().path(), command).unwrap();
    }
    fs::write(
        runtime.dir.join("boot_id"),
        "3a2f6a51-0000-4000-8000-000000000002\n",
    )
    .unwrap();
}

fn rules(runtime: &Runtime) -> String {
    within(runtime.node.netns().path(), &["nft", "list", "ruleset"]).unwrap()
}

fn checkpointed(runtime: &Runtime) -> String {
    let directory = runtime.node.run_dir().join("pod-events/pods");
    let files = fs::read_dir(directory).unwrap();
    let texts = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    texts.collect()
}

fn since(runtime: &Runtime, count: usize) -> Vec<Recorded> {
    let calls = recorded(&runtime.chain).unwrap();
    calls.into_iter().skip(count).collect()
}

// scenario: 4
#[test]
fn after_a_reboot_dels_name_no_netns_and_adds_name_new_ones_and_nothing_of_the_old_is_left() {
    let node = Node::new().unwrap();
    let mut runtime = Runtime::on(node).unwrap();
    let boot = runtime.dir.join("boot_id");
    start(&runtime.node, &boot);
    runtime.node.ready().unwrap();
    record(&runtime.chain).unwrap();
    enrol_shop(&runtime);
    let names = ["web-0", "web-1", "web-2"];
    let old = names.map(|name| runtime.pod(Spec::new(name)).unwrap());
    old.iter().for_each(|pod| in_the_mesh(&runtime, pod));
    let before = rules(&runtime);
    assert!(
        old.iter().all(|pod| before.contains(&pod.v4.to_string())),
        "{before}"
    );
    let netns: BTreeSet<_> = old.iter().map(|pod| pod.path().to_owned()).collect();
    let count = recorded(&runtime.chain).unwrap().len();

    cut_power(&mut runtime, &old);
    runtime.boot().unwrap();
    // The kubelet, started before the agent, ends the sandboxes and starts the pods anew.
    let found = runtime.cri.sandboxes().unwrap();
    assert_eq!(found.len(), names.len());
    for sandbox in found {
        assert_eq!(sandbox.state, 1, "{sandbox:?} is ready");
        runtime.end(&sandbox.id).unwrap();
    }
    let refused = runtime
        .cri
        .run(runtime.config(&Spec::new("web-0")))
        .unwrap_err();
    assert_error(refused.message(), &["the pod waits", "[AGENT_UNAVAILABLE]"]);
    let calls = since(&runtime, count);
    let dels: Vec<_> = calls.iter().filter(|call| call.code == 0).collect();
    let short: Vec<_> = dels
        .iter()
        .map(|call| (call.verb.as_str(), call.netns.as_str()))
        .collect();
    let (last, others) = short.split_last().unwrap();
    assert_eq!(others, vec![("DEL", ""); others.len()]);
    assert!(others.len() >= names.len(), "{calls:?}");
    // The waiting ADD's entry is of this boot.
    assert_eq!((last.0, last.1.is_empty()), ("DEL", false));
    assert!(spooled(&runtime.node) > 0);

    start(&runtime.node, &boot);
    runtime.node.ready().unwrap();
    let count = recorded(&runtime.chain).unwrap().len();
    let new = names.map(|name| runtime.pod(Spec::new(name)).unwrap());
    new.iter().for_each(|pod| in_the_mesh(&runtime, pod));
    let calls = since(&runtime, count);
    let mut all = calls.iter();
    assert!(all.all(|call| (call.verb.as_str(), call.code) == ("ADD", 0)));
    let mut all = calls.iter();
    assert!(all.all(|call| !netns.contains(Path::new(&call.netns))));
    nothing_of(&runtime, &old, &new);
    for pod in new {
        runtime.end(&pod.container_id).unwrap();
    }
    runtime.until_empty().unwrap();
}

/// Claims, records, workloads, probed addresses and spool are of new sandboxes only.
fn nothing_of(runtime: &Runtime, old: &[Pod], new: &[Pod]) {
    eventually("the spool is read", TIMEOUT, || {
        ensure!(spooled(&runtime.node) == 0, "{}", spooled(&runtime.node));
        anyhow::Ok(())
    })
    .unwrap();
    let ids =
        |pods: &[Pod]| -> BTreeSet<_> { pods.iter().map(|pod| pod.container_id.clone()).collect() };
    let claims = runtime.node.api().claims().unwrap();
    let claimed = claims.into_iter().filter_map(|claim| claim.sandbox);
    let claimed: BTreeSet<_> = claimed.map(|sandbox| sandbox.container_id).collect();
    assert_eq!(claimed, ids(new));
    let (records, rules) = (checkpointed(runtime), rules(runtime));
    for pod in old {
        assert!(!records.contains(&pod.container_id), "{records}");
        assert!(!rules.contains(&pod.v4.to_string()), "{rules}");
        assert!(!rules.contains(&pod.v6.to_string()), "{rules}");
    }
    for pod in new {
        assert!(records.contains(&pod.container_id), "{records}");
        assert!(rules.contains(&pod.v4.to_string()), "{rules}");
    }
    let workloads = runtime.node.api().workloads().unwrap().workloads;
    assert_eq!(workloads.len(), new.len());
}
