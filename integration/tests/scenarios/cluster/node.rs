//! The node itself, before inpod is installed.

use integration::kubernetes::text;

use crate::cluster::{
    agent::{on_the_node, uid},
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
        for pid in cluster.machine.pids(uid(pod)).unwrap() {
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
            .machine
            .exec(&["cat", "/proc/sys/kernel/panic_on_oops"])
            .unwrap();
        assert_eq!(
            (there.trim(), here.trim() == "1" || here.trim() == "0"),
            ("1", true)
        );
        cluster.remove("plain");
    });
}
