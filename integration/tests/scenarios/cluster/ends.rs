//! Ends of pods, and pods that no API server started.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{LONG, get},
};
use serde_json::json;

use crate::cluster::{
    agent::on_the_node,
    apps::{address, container, create, template},
    mesh::{serves_through_ztunnel, taken},
};

#[test]
fn a_pod_that_takes_its_time_to_stop_is_served_through_ztunnel_until_its_end() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("slow", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let stop = json!({"lifecycle": {"preStop": {"exec": {"command": ["/bin/sleep", "10"]}}}});
        let grace = json!({"terminationGracePeriodSeconds": 15});
        create(cluster, "slow", "web", &grace, &container(&stop));
        let pods = cluster.until_ready("slow", "app=web", 1).unwrap();
        let pod = pods.first().unwrap();
        cluster.until_enrolled(pod);
        let (path, now) = ("/api/v1/namespaces/slow/pods/web", json!({}));
        cluster.server.delete_with(path, &now).unwrap();
        let (asked, before) = (Instant::now(), taken(cluster, pod, 15006));
        let mut answered = 0;
        while asked.elapsed() < Duration::from_secs(9) {
            let answer = get(&cluster.outside, address(pod));
            assert!(answer.is_ok(), "after {:?}: {answer:?}", asked.elapsed());
            answered += 1;
            thread::sleep(Duration::from_millis(50));
        }
        let through = taken(cluster, pod, 15006) - before;
        assert_eq!(through, answered, "went through ztunnel");
        eventually("it is gone", LONG, || {
            ensure!(cluster.server.get(path).is_err(), "it is there");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.remove("slow");
    });
}

#[test]
fn a_static_pod_joins_the_mesh_and_leaves_nothing() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("fixed", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let mut pod = template("fixed", &container(&json!({})));
        let metadata = pod
            .pointer_mut("/metadata")
            .unwrap()
            .as_object_mut()
            .unwrap();
        metadata.extend([
            ("name".to_owned(), json!("web")),
            ("namespace".to_owned(), json!("fixed")),
        ]);
        let all = pod.as_object_mut().unwrap();
        all.extend([
            ("apiVersion".to_owned(), json!("v1")),
            ("kind".to_owned(), json!("Pod")),
        ]);
        let file = cluster
            .machine()
            .etc("kubernetes/manifests/web.json")
            .unwrap();
        fs::write(&file, pod.to_string()).unwrap();
        let pods = cluster.until_ready("fixed", "app=fixed", 1).unwrap();
        let pod = pods.first().unwrap();
        cluster.until_enrolled(pod);
        serves_through_ztunnel(cluster, pod);
        fs::remove_file(&file).unwrap();
        eventually("it is gone", LONG, || {
            let pods = cluster.pods("fixed", "app=fixed")?;
            ensure!(pods.is_empty(), "{pods:?}");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.remove("fixed");
    });
}
