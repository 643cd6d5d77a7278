//! Pods without an ADD: from before inpod, from another boot, and from a chain without the plugin.

use std::fs;

use integration::{App, Cgroups, Inhabitant, SERVICES};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::*;

/// Creates a sandbox without an ADD, and its process as a runtime leaves it.
fn unseen(cluster: &Cluster, cgroups: &Cgroups, name: &str, uid: &str) -> (Pod, Inhabitant) {
    let pod = cluster.sandbox(name, uid);
    let process = Inhabitant::of(&pod).unwrap();
    cgroups.put(&pod, process.pid()).unwrap();
    (pod, process)
}

fn is_annotated(cluster: &Cluster, name: &str) -> bool {
    let object = cluster.server.get(&cluster.path(name)).unwrap();
    let value = object.pointer("/metadata/annotations/ambient.istio.io~1redirection");
    value.and_then(Value::as_str) == Some("enabled")
}

fn until_annotated(cluster: &Cluster, name: &str) {
    eventually("it is annotated", TIMEOUT, || {
        ensure!(is_annotated(cluster, name), "it is not");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Removes processes, memory and pods' netns, as a reboot does.
fn reboot(cluster: &Cluster, pods: &[&Pod]) {
    for process in SERVICES.into_iter().chain(["ztunnel"]) {
        cluster.node.stop(process, Signal::SIGKILL).unwrap();
    }
    fs::remove_dir_all(cluster.node.run_dir()).unwrap();
    fs::remove_file(cluster.node.access_log()).unwrap();
    pods.iter().for_each(|pod| pod.unmount().unwrap());
}

#[test]
fn pods_that_run_when_inpod_comes_are_enrolled_as_their_labels_say() {
    let cluster = Cluster::waiting();
    let cgroups = Cgroups::new().unwrap();
    let run = |name, mode| {
        let uid = cluster.create(&cluster.object(name, mode));
        let (pod, process) = unseen(&cluster, &cgroups, name, &uid);
        set_status(&cluster, name, &runs_in(&pod));
        (pod, process)
    };
    let (wanted, _one) = run("wanted", Some("ambient"));
    let (plain, _other) = run("plain", None);
    let outsider = outsider(&cluster);
    let _app = App::start(&wanted.netns, PORT).unwrap();
    cluster.start();
    until_in(&cluster, &wanted, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &wanted), CAPTURED);
    assert_eq!(plain.traces().unwrap(), NOTHING);
    assert_eq!(served(&cluster), [wanted.spec.uid]);
}

// scenario: 1
#[test]
fn after_a_reboot_a_pod_that_is_annotated_and_was_never_added_is_not_trusted_but_enrolled() {
    let cluster = Cluster::shared();
    let cgroups = Cgroups::new().unwrap();
    let before = cluster.pod("web", Some("ambient"));
    set_status(&cluster, "web", &runs_in(&before));
    until_in(&cluster, &before, Reason::LabelOnPod);
    until_annotated(&cluster, "web");
    reboot(&cluster, &[&before]);
    // The kubelet starts it anew; the chain lacks the plugin.
    let (pod, _process) = unseen(&cluster, &cgroups, "web", &before.spec.uid);
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    assert!(is_annotated(&cluster, "web"));
    cluster.node.start_all().unwrap();
    cluster.until_served();
    // The status has addresses from before the boot: nothing proves yet which netns is the pod's.
    let known = cluster.node.explain(&pod.spec).unwrap();
    assert_ne!(known.state(), PodState::Enrolled, "{known:?}");
    assert_eq!(pod.traces().unwrap(), NOTHING);
    set_status(&cluster, "web", &runs_in(&pod));
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    until_annotated(&cluster, "web");
}

// scenario: 1
#[test]
fn after_a_reboot_a_pod_that_is_annotated_is_enrolled_by_its_add() {
    let cluster = Cluster::shared();
    let before = cluster.pod("web", Some("ambient"));
    until_annotated(&cluster, "web");
    reboot(&cluster, &[&before]);
    cluster.node.start_all().unwrap();
    cluster.until_served();
    let pod = cluster.sandbox("web", &before.spec.uid);
    cluster.node.add(&pod).unwrap();
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
    assert_eq!(cluster.node.api().claims().unwrap().len(), 1);
}

// scenario: 1
#[test]
fn what_was_written_down_in_another_boot_is_not_taken_for_what_is() {
    let cluster = Cluster::shared();
    let before = cluster.pod("web", Some("ambient"));
    until_annotated(&cluster, "web");
    for service in SERVICES {
        cluster.node.stop(service, Signal::SIGKILL).unwrap();
    }
    // A node whose /run survives reboots.
    let records = cluster.node.run_dir().join("pod-events/pods");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for entry in fs::read_dir(&records).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(boot.trim()), "{text}");
        let other = text.replace(boot.trim(), "00000000-0000-0000-0000-000000000000");
        fs::write(path, other).unwrap();
    }
    before.unmount().unwrap();
    cluster.node.start_all().unwrap();
    cluster.until_served();
    let pod = cluster.sandbox("web", &before.spec.uid);
    cluster.node.add(&pod).unwrap();
    until_in(&cluster, &pod, Reason::LabelOnPod);
    let claims = cluster.node.api().claims().unwrap();
    assert_eq!(claims.len(), 1, "{claims:?}");
}

// scenario: 5
#[test]
fn a_sandbox_that_replaces_another_of_its_uid_is_captured_and_stays_so_when_the_old_one_goes() {
    let cluster = Cluster::shared();
    let first = cluster.pod("web", Some("ambient"));
    until_in(&cluster, &first, Reason::LabelOnPod);
    let second = cluster.sandbox("web", &first.spec.uid);
    cluster.node.add(&second).unwrap();
    let outsider = outsider(&cluster);
    let _app = App::start(&second.netns, PORT).unwrap();
    assert_eq!(taken(&cluster, &outsider, &second), CAPTURED);
    cluster.node.del(&first).unwrap();
    let known = until_in(&cluster, &second, Reason::LabelOnPod);
    assert_eq!(known.sandbox.unwrap().container_id, second.container_id);
    assert_eq!(taken(&cluster, &outsider, &second), CAPTURED);
    assert_eq!(cluster.node.api().claims().unwrap().len(), 1);
}

// scenario: 5
#[test]
fn a_sandbox_that_took_anothers_place_without_a_word_is_found_and_enrolled() {
    let cluster = Cluster::shared();
    let cgroups = Cgroups::new().unwrap();
    let first = cluster.pod("web", Some("ambient"));
    set_status(&cluster, "web", &runs_in(&first));
    until_in(&cluster, &first, Reason::LabelOnPod);
    // Neither a DEL nor an ADD follows.
    first.unmount().unwrap();
    let (second, _process) = unseen(&cluster, &cgroups, "web", &first.spec.uid);
    set_status(&cluster, "web", &runs_in(&second));
    let outsider = outsider(&cluster);
    let _app = App::start(&second.netns, PORT).unwrap();
    eventually("it is enrolled", 3 * TIMEOUT, || {
        let traces = second.traces()?;
        ensure!(
            traces != NOTHING,
            "{:?}",
            cluster.node.explain(&second.spec)
        );
        anyhow::Ok(())
    })
    .unwrap();
    until_in(&cluster, &second, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &second), CAPTURED);
}

#[test]
fn a_static_pod_that_runs_when_inpod_comes_is_found_by_its_hash() {
    let cluster = Cluster::waiting();
    let cgroups = Cgroups::new().unwrap();
    let hash = "fedcba9876543210fedcba9876543210";
    let mut object = cluster.object("static", Some("ambient"));
    object["metadata"]["annotations"] = json!({
        "kubernetes.io/config.hash": hash,
        "kubernetes.io/config.mirror": hash,
        "kubernetes.io/config.source": "file",
    });
    object["spec"]["serviceAccountName"] = Value::Null;
    let uid = cluster.create(&object);
    // Its cgroup name contains the hash.
    let (mut pod, _process) = unseen(&cluster, &cgroups, "static", hash);
    pod.spec.uid = uid;
    set_status(&cluster, "static", &runs_in(&pod));
    let outsider = outsider(&cluster);
    let _app = App::start(&pod.netns, PORT).unwrap();
    cluster.start();
    until_in(&cluster, &pod, Reason::LabelOnPod);
    assert_eq!(taken(&cluster, &outsider, &pod), CAPTURED);
}
