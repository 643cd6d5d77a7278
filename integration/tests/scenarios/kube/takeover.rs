//! inpod is installed while the API server is away: until it shows another agent's pods, ztunnel gets no
//! snapshot and keeps them.

use std::net::SocketAddr;

use crate::common::cluster::Cluster;
use crate::common::flows::Flow;
use crate::common::incumbent::{Form, Incumbent, redirect};
use anyhow::ensure;
use integration::{App, Pod, SERVICES, Spec, TIMEOUT, eventually};
use serde_json::json;

const PORT: u16 = 8080;

/// Creates a running pod with another agent's annotation.
fn annotated(cluster: &Cluster, name: &str) -> Pod {
    let mut object = cluster.object(name, Some("ambient"));
    let annotations = json!({"ambient.istio.io/redirection": "enabled"});
    *object.pointer_mut("/metadata").unwrap() = json!({
        "name": name,
        "namespace": cluster.namespace,
        "labels": {"istio.io/dataplane-mode": "ambient"},
        "annotations": annotations,
    });
    let uid = cluster.create(&object);
    cluster.sandbox(name, &uid)
}

#[test]
fn until_the_api_server_shows_the_incumbents_pods_none_of_them_is_cut_nor_afterwards() {
    let (cluster, proxy) = Cluster::behind_proxy();
    let pods = ["a", "b", "c"].map(|name| annotated(&cluster, name));
    let outsider = cluster.node.sandbox(Spec::new("outsider")).unwrap();
    let _app = App::start(&outsider.netns, PORT).unwrap();
    let start = || cluster.node.start_ztunnel(&[]);
    let mut incumbent = Incumbent::serve(&cluster.node.zds_socket(), start).unwrap();
    incumbent.give(&pods).unwrap();
    pods.iter()
        .for_each(|pod| redirect(pod, Form::Iptables).unwrap());
    drop(incumbent);
    let to = SocketAddr::new(outsider.v4.into(), PORT);
    let flows = pods.each_ref().map(|pod| Flow::open(pod, to).unwrap());

    proxy.go_away();
    SERVICES
        .iter()
        .for_each(|service| cluster.node.start(service).unwrap());
    assert!(cluster.until_pods(false).contains("does not answer"));
    eventually("ztunnel is connected", TIMEOUT, || {
        let reported = cluster.node.api().workloads()?;
        ensure!(
            !reported.seeded && reported.sessions.len() == 1,
            "{reported:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    flows.iter().for_each(|flow| flow.goes_on().unwrap());

    proxy.come_back();
    cluster.until_served();
    let reported = cluster.node.api().workloads().unwrap();
    assert!(
        reported.seeded && reported.workloads.len() == pods.len(),
        "{reported:?}"
    );
    flows.iter().for_each(|flow| flow.goes_on().unwrap());
    let started = cluster.node.tail("ztunnel", usize::MAX);
    assert_eq!(started.matches("pod started").count(), pods.len());
}
