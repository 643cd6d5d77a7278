//! Other forms of a deployment, under the same traffic as in `life`: the broker in a pod of its own, two releases of
//! ztunnel on each node, and inpod's injector and repair in a mesh that istiod controls.

use integration::kubernetes::Image;
use serde_json::json;

use crate::{
    cluster::{
        agent::SYSTEM,
        apps::{make_deployment, ready},
        injected::{INJECTOR, VALUES, plain, until_asked},
        repaired::peer,
        sidecar::{IMAGES, load, serves_through_proxy, until_redirected},
    },
    mesh::{
        apps::{App, until_enrolled},
        control::{ISTIO, on_stock_ztunnels},
        life::Scene,
    },
};

/// The release of ztunnel beside the first one.
const SECOND: &str = "ztunnel-second";

#[test]
fn broker_moves_to_a_pod_of_its_own_and_back() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        let broker = "app.kubernetes.io/name=inpod-ztunnel-broker";
        let split = ["topology=split", peer()];
        for (values, brokers) in [(&split[..], 2), (&[], 0)] {
            cluster.upgrade(values);
            cluster.until_rolled(2);
            cluster.until_ready(SYSTEM, broker, brokers).unwrap();
            cluster.until_whole();
            let name = format!("with-{brokers}");
            let next = App::deploy(cluster, "life", &name, None, 2);
            until_enrolled(cluster, &next.pods());
        }
        scene.end();
    });
}

#[test]
fn second_release_of_ztunnel_takes_over_and_hands_back() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        // istiod issues certificates to ztunnels of both names.
        let accounts = format!("env.CA_TRUSTED_NODE_ACCOUNTS={ISTIO}/ztunnel\\,{ISTIO}/{SECOND}");
        cluster.deploy_istiod(&[&accounts]);
        for (new, old) in [(SECOND, "ztunnel"), ("ztunnel", SECOND)] {
            cluster.deploy_ztunnel(new);
            cluster.until_ready(ISTIO, "app=ztunnel", 4).unwrap();
            let name = format!("with-{new}");
            let next = App::deploy(cluster, "life", &name, None, 2);
            until_enrolled(cluster, &next.pods());
            let uninstall = ["uninstall", old, "--namespace", ISTIO, "--wait"];
            cluster.helm(&uninstall).unwrap();
            cluster.until_whole();
            until_enrolled(cluster, &scene.web.pods());
        }
        cluster.deploy_istiod(&[]);
        scene.end_after_takeover();
    });
}

#[test]
fn injector_and_repair_serve_a_namespace_beside_ambient_ones() {
    on_stock_ztunnels(|cluster| {
        let scene = Scene::new(cluster, 4);
        load(cluster, &IMAGES);
        load(cluster, &[Image::Shipped("injector")]);
        // deploy/docs/injector.md demands the removal.
        let webhook = ["mutatingwebhookconfiguration", "istio-sidecar-injector"];
        cluster
            .kubectl(&[&["delete"][..], &webhook].concat())
            .unwrap();
        let values = [&VALUES[..], &["repair.enabled=true"]].concat();
        cluster.upgrade(&values);
        cluster.until_rolled(2);
        cluster.until_ready(SYSTEM, INJECTOR, 2).unwrap();
        let labels = json!({"istio-injection": "enabled"});
        cluster.make_namespace("inject", &labels).unwrap();
        until_asked(cluster);
        let mut pods = plain("native");
        let spec = pods.pointer_mut("/spec").unwrap().as_object_mut().unwrap();
        let node = cluster.machine().node.name();
        spec.insert("nodeName".to_owned(), json!(node));
        make_deployment(cluster, "inject", "native", &pods);
        let pod = ready(cluster, "inject", "native");
        until_redirected(cluster, &pod, "podnet");
        serves_through_proxy(cluster, &pod);
        cluster.remove("inject");
        cluster.upgrade(&[]);
        cluster.until_rolled(2);
        cluster.deploy_istiod(&[]);
        scene.end();
    });
}
