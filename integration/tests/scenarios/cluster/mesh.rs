//! Pods of a cluster join the mesh and leave it.

use anyhow::ensure;
use inpod_linux::Netns;
use integration::{
    Access, eventually,
    kubernetes::{LONG, Report, Traffic, ask, get, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, named, on_the_node, uid},
    apps::{address, container, create, deploy, template},
};

/// Counts connections that a ztunnel accepted in a pod on a port.
pub(crate) fn taken(cluster: &ExclusiveCluster<'_>, pod: &Value, listener: u64) -> usize {
    let is_meant = |access: &&Access| {
        access.event == "accepted"
            && access.uid == text(pod, "/metadata/uid")
            && access.listener == listener
    };
    let all = cluster.machine().accesses().unwrap();
    all.iter().filter(is_meant).count()
}

pub(crate) fn outside(cluster: &ExclusiveCluster<'_>) -> Netns {
    Netns::open(cluster.outside.path(), &["/run/netns".into()]).unwrap()
}

pub(crate) fn traffic(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Traffic {
    Traffic::start(outside(cluster), address(pod))
}

/// Expects traffic without failures.
pub(crate) fn assert_unbroken(traffic: Traffic) -> Report {
    let report = traffic.end().unwrap();
    assert!(report.answered > 10, "{report:?}");
    assert_eq!(report.failed, [], "{} were answered", report.answered);
    report
}

/// Expects an answer through the pod's ztunnel, with the client's address.
pub(crate) fn serves_through_ztunnel(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let (from, seen) = ask(&cluster.outside, address(pod), "/cgi-bin/who").unwrap();
    assert!(seen.contains(&from.ip().to_string()), "{seen}");
    // Other clients may ask meanwhile.
    let is_it = |access: &Access| {
        access.uid == text(pod, "/metadata/uid")
            && access.listener == 15006
            && access.source == Some(from)
    };
    let all = cluster.machine().accesses().unwrap();
    assert!(all.iter().any(is_it), "{from} is not in {all:?}");
}

#[test]
fn a_deployment_in_a_labelled_namespace_comes_up_in_the_mesh_and_serves_through_ztunnel() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("shop", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let server = deploy(cluster, "shop", "web", &container(&json!({})));
        let client = deploy(cluster, "shop", "client", &container(&json!({})));
        for pod in [&server, &client] {
            cluster.until_enrolled(pod);
            serves_through_ztunnel(cluster, pod);
        }
        // Through both ztunnels, the client's and the server's.
        let (out, into) = (
            taken(cluster, &client, 15001),
            taken(cluster, &server, 15006),
        );
        let netns = cluster.machine().netns_of(uid(&client)).unwrap();
        assert_eq!(get(&netns, address(&server)).unwrap().trim(), "here");
        assert_eq!(taken(cluster, &client, 15001), out + 1);
        assert_eq!(taken(cluster, &server, 15006), into + 1);
        cluster.remove("shop");
    });
}

#[test]
fn a_running_namespace_is_labelled_and_unlabelled_without_a_failed_new_connection() {
    on_the_node(|cluster| {
        cluster.make_namespace("moves", &json!({})).unwrap();
        let pod = deploy(cluster, "moves", "web", &container(&json!({})));
        cluster.until_outside(&pod);
        let traffic = traffic(cluster, &pod);
        cluster.label_namespace("moves", Some("ambient")).unwrap();
        cluster.until_enrolled(&pod);
        serves_through_ztunnel(cluster, &pod);
        cluster.label_namespace("moves", None).unwrap();
        cluster.until_outside(&pod);
        let before = taken(cluster, &pod, 15006);
        assert_eq!(get(&cluster.outside, address(&pod)).unwrap().trim(), "here");
        assert_eq!(taken(cluster, &pod, 15006), before);
        assert_unbroken(traffic);
        // The containers are never restarted.
        let (namespace, name) = named(&pod);
        let now = cluster.pod(namespace, name).unwrap();
        assert_eq!(
            now.pointer("/status/containerStatuses/0/restartCount"),
            Some(&json!(0))
        );
        cluster.remove("moves");
    });
}

#[test]
fn a_job_finishes_and_its_pod_leaves_the_mesh() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("batch", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let mut pods = template(
            "once",
            &container(&json!({"command": ["/bin/sleep", "5"], "readinessProbe": null})),
        );
        let spec = pods.pointer_mut("/spec").unwrap().as_object_mut().unwrap();
        spec.insert("restartPolicy".to_owned(), json!("Never"));
        let job = json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "once", "namespace": "batch"},
            "spec": {"backoffLimit": 0, "template": pods},
        });
        let path = "/apis/batch/v1/namespaces/batch/jobs";
        cluster.server.create(path, &job).unwrap();
        let pods = cluster.until_ready("batch", "app=once", 1).unwrap();
        let pod = pods.first().unwrap();
        cluster.until_enrolled(pod);
        eventually("the job is done", LONG, || {
            let job = cluster.server.get(&format!("{path}/once"))?;
            ensure!(integration::kubernetes::is(&job, "Complete"), "{job}");
            anyhow::Ok(())
        })
        .unwrap();
        eventually("the pod has left", LONG, || {
            let known = cluster.inpod(&["pods"])?;
            let line = known.lines().find(|line| line.starts_with("batch "));
            ensure!(
                line.is_none_or(|line| !line.contains("enrolled")),
                "{known}"
            );
            let claims = cluster.pod("batch", named(pod).1)?;
            let shown = text(
                &claims,
                "/metadata/annotations/ambient.istio.io~1redirection",
            );
            ensure!(shown.is_empty(), "the annotation is {shown:?}");
            anyhow::Ok(())
        })
        .unwrap();
        cluster.remove("batch");
    });
}

#[test]
fn a_pod_that_is_deleted_by_force_is_forgotten_and_one_of_its_name_joins() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("force", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let mut before = String::new();
        for _ in 0..2 {
            create(cluster, "force", "web", &json!({}), &container(&json!({})));
            let pods = cluster.until_ready("force", "app=web", 1).unwrap();
            let pod = pods.first().unwrap();
            assert_ne!(uid(pod), before);
            before = uid(pod).to_owned();
            cluster.until_enrolled(pod);
            serves_through_ztunnel(cluster, pod);
            cluster
                .server
                .delete("/api/v1/namespaces/force/pods/web")
                .unwrap();
        }
        cluster.remove("force");
    });
}
