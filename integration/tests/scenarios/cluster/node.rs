//! The node itself, before inpod is installed.

use std::process::Output;

use integration::kubernetes::text;

use crate::cluster::{
    agent::{SYSTEM, on_the_node, uid},
    apps::plain,
};

#[test]
fn a_pod_runs_outside_of_the_mesh_in_a_cgroup_that_names_it_and_the_kubelets_settings_are_its_own()
{
    on_the_node(|cluster| {
        cluster
            .make_namespace("plain", &serde_json::json!({}))
            .unwrap();
        plain(cluster, "plain", "bare");
        let pods = cluster.until_ready("plain", "app=bare", 1).unwrap();
        let pod = pods.first().unwrap();
        for pid in cluster.machine().pids(uid(pod)).unwrap() {
            let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
            let place = format!("/kubepods/besteffort/pod{}/", uid(pod));
            for line in cgroup.lines() {
                assert!(line.contains(&place), "{line}");
            }
        }
        let tables = cluster.in_netns(pod, &["nft", "list", "tables"]);
        assert_eq!(tables, "");
        assert_eq!(
            text(
                &cluster
                    .explain("plain", text(pod, "/metadata/name"))
                    .unwrap(),
                "/state"
            ),
            "POD_STATE_OUT"
        );
        // The kubelet's settings must not have changed the machine.
        let here = std::fs::read_to_string("/proc/sys/kernel/panic_on_oops").unwrap();
        let there = cluster
            .machine()
            .exec(&["cat", "/proc/sys/kernel/panic_on_oops"])
            .unwrap();
        assert_eq!(
            (there.trim(), here.trim() == "1" || here.trim() == "0"),
            ("1", true)
        );
        cluster.remove("plain");
    });
}

/// The script's cases of failure are in `kube::kubectl`; here kubectl, API server, kubelet and images are real.
#[test]
fn kubectl_inpod_asks_the_client_in_the_agents_pod() {
    on_the_node(|cluster| {
        let printed = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
        let answer = |arguments: &[&str]| {
            let output = cluster.kubectl_inpod(arguments);
            assert!(output.status.success(), "{arguments:?}: {output:?}");
            printed(&output)
        };
        assert!(answer(&["status"]).contains("ztunnel-broker  ready"));
        let pods = answer(&["pods", "-n", SYSTEM]);
        assert!(pods.contains("HOST_NETWORK"), "{pods}");
        let agent = text(&cluster.agent(), "/metadata/name").to_owned();
        let explained = answer(&["explain", &format!("{SYSTEM}/{agent}")]);
        assert!(explained.contains("HOST_NETWORK"), "{explained}");
        // The directories of this machine are in memory, which a real node loses.
        let doctor = cluster.kubectl_inpod(&["doctor"]);
        assert_eq!(doctor.status.code(), Some(1), "{doctor:?}");
        let doctor = printed(&doctor);
        assert!(doctor.contains("(installer/reboot)"), "{doctor}");
        assert!(doctor.contains(" 1 failed, "), "{doctor}");
        let directory = tempfile::tempdir().unwrap();
        answer(&[
            "bundle",
            "--output",
            &directory.path().display().to_string(),
        ]);
        assert!(directory.path().join("inpod-node-1.tar").exists());
    });
}
