//! The containers of a running agent get images of the previous release in place, as `deploy/docs/upgrade.md` describes.

use std::time::Instant;

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{Image, LONG, PREVIOUS_VERSION, Traffic, text},
};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, SERVICES, SHIPPED, SYSTEM, named, on_the_node, status_of, uid},
    apps::{address, container, deploy},
    mesh::{assert_unbroken, serves_through_ztunnel, taken, traffic},
    restarts::restarts,
};

/// Keeps the DaemonSet controller from replacing a pod whose template has changed.
const ON_DELETE: &str = "updateStrategy.type=OnDelete";

const DAEMONSET: &str = "/apis/apps/v1/namespaces/inpod-system/daemonsets/inpod";

fn set_image(cluster: &ExclusiveCluster<'_>, agent: &Value, service: &str, image: &str) {
    let (pod, change) = (
        format!("pod/{}", named(agent).1),
        format!("{service}={image}"),
    );
    cluster
        .kubectl(&["--namespace", SYSTEM, "set", "image", &pod, &change])
        .unwrap();
}

/// Returns the ID and the restarts of every container except the changed one.
fn others<'a>(agent: &'a Value, changed: &str) -> Vec<(&'a str, u64)> {
    let others = SERVICES.into_iter().filter(|service| *service != changed);
    let run = |service| {
        let id = text(status_of(agent, service).unwrap(), "/containerID");
        (id, restarts(agent, service))
    };
    others.map(run).collect()
}

/// Waits until the kubelet has stopped the container of an agent that is to run an image that the node lacks.
fn lacks_image(cluster: &ExclusiveCluster<'_>, agent: &Value, service: &str) {
    set_image(cluster, agent, service, "localhost/absent:1");
    let now = eventually("the container waits for its image", LONG, || {
        let now = cluster.pod(SYSTEM, named(agent).1)?;
        let status = status_of(&now, service)?;
        let reason = text(status, "/state/waiting/reason");
        ensure!(reason == "ErrImageNeverPull", "{status}");
        anyhow::Ok(now)
    })
    .unwrap();
    assert_eq!(others(&now, service), others(agent, service));
}

/// Waits until the container runs the image, and prints how long the change took.
fn change_image(cluster: &ExclusiveCluster<'_>, agent: &Value, service: &'static str) -> Value {
    let (image, began) = (Image::Previous(service).reference(), Instant::now());
    set_image(cluster, agent, service, &image);
    eventually("the container runs the other image", LONG, || {
        let now = cluster.pod(SYSTEM, named(agent).1)?;
        let status = status_of(&now, service)?;
        ensure!(text(status, "/image") == image, "{status}");
        ensure!(status.get("ready") == Some(&json!(true)), "{status}");
        anyhow::Ok(())
    })
    .unwrap();
    let ready = began.elapsed();
    cluster.until_whole();
    let whole = began.elapsed();
    eprintln!("{service}: ready after {ready:.1?}, ztunnel is connected after {whole:.1?}");
    let now = cluster.agent();
    assert_eq!(uid(&now), uid(agent));
    assert_eq!(others(&now, service), others(agent, service));
    assert_eq!(restarts(&now, service), restarts(agent, service) + 1);
    now
}

/// Gives the DaemonSet's template the images that the containers of the agent run already.
fn change_template(cluster: &ExclusiveCluster<'_>, agent: &Value) {
    cluster.upgrade(&[ON_DELETE, &format!("tag={PREVIOUS_VERSION}")]);
    eventually("the controller knows the template", LONG, || {
        let set = cluster.server.get(DAEMONSET)?;
        let known = set.pointer("/status/observedGeneration");
        ensure!(known == set.pointer("/metadata/generation"), "{set}");
        // The agent is of the earlier template.
        let updated = set.pointer("/status/updatedNumberScheduled");
        ensure!(updated.is_none_or(|count| count == &json!(0)), "{set}");
        anyhow::Ok(())
    })
    .unwrap();
    let now = cluster.agent();
    assert_eq!(uid(&now), uid(agent));
    assert_eq!(others(&now, ""), others(agent, ""));
}

fn delete_agent(cluster: &ExclusiveCluster<'_>, agent: &Value) {
    let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{}", named(agent).1);
    cluster.server.delete(&path).unwrap();
    cluster.until_replaced(agent);
    cluster.until_whole();
    let expected = SERVICES.map(|service| Image::Previous(service).reference());
    let mut images = cluster.images();
    images.sort_by_key(|image| expected.iter().position(|known| known == image));
    assert_eq!(images, expected);
}

#[test]
fn container_gets_previous_image_and_the_others_stay() {
    on_the_node(|cluster| {
        for name in SHIPPED {
            cluster.machine().load(&Image::Previous(name)).unwrap();
        }
        cluster
            .make_namespace("image", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pods = ["web", "client"].map(|name| {
            let pod = deploy(cluster, "image", name, &container(&json!({})));
            cluster.until_enrolled(&pod);
            pod
        });
        let [server, client] = &pods;
        let mut agent = cluster.agent();
        cluster.upgrade(&[ON_DELETE]);
        let netns = cluster.machine().netns_of(uid(client)).unwrap();
        let through_both = Traffic::start(netns, address(server));
        let inbound = traffic(cluster, client);

        lacks_image(cluster, &agent, "netconfig");
        for service in SERVICES {
            agent = change_image(cluster, &agent, service);
            for pod in &pods {
                cluster.until_enrolled(pod);
                serves_through_ztunnel(cluster, pod);
            }
            let next = deploy(cluster, "image", service, &container(&json!({})));
            cluster.until_enrolled(&next);
        }
        change_template(cluster, &agent);
        delete_agent(cluster, &agent);

        // With the default strategy, the controller replaces the agent by itself.
        let agent = cluster.agent();
        cluster.upgrade(&[]);
        cluster.until_replaced(&agent);
        cluster.until_whole();
        for pod in &pods {
            cluster.until_enrolled(pod);
        }
        let (outbound, inbound) = (assert_unbroken(through_both), assert_unbroken(inbound));
        assert!(taken(cluster, client, 15001) >= outbound.answered);
        assert!(taken(cluster, server, 15006) >= outbound.answered);
        assert!(taken(cluster, client, 15006) >= inbound.answered);
        let answered = outbound.answered + inbound.answered;
        eprintln!("{answered} requests answered, none lost");
        cluster.remove("image");
    });
}
