//! From istio-cni, by its chart and under kubelets, to inpod and back, by `deploy/docs/migrate-from-istio-cni.md`.

use anyhow::ensure;
use integration::{
    eventually,
    kubernetes::{Chain, Image, LONG, NodeConfig, ProxyMode, text},
};
use serde_json::{Value, json};

use crate::{
    cluster::{
        agent::{AGENT, ExclusiveCluster, SYSTEM, SharedCluster, inpod_on, named},
        apps::{PORT, container},
        mesh::assert_unbroken,
    },
    mesh::{
        apps::{App, make_ambient},
        control::{COREDNS, ISTIO, ISTIOD},
    },
};

const ISTIO_CNI: &str = "k8s-app=istio-cni-node,app.kubernetes.io/name=istio-cni";

static CLUSTER: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
    ],
    &[ISTIOD, COREDNS, Image::StockZtunnel, Image::IstioCni],
    |cluster| {
        cluster.deploy_control_plane(&[]);
        cluster.deploy_ztunnel("ztunnel");
        cluster.deploy_chart("istio-cni", "istio-cni", &[]);
        cluster.until_ready(ISTIO, ISTIO_CNI, 2).unwrap();
        cluster.until_ready(ISTIO, "app=ztunnel", 2).unwrap();
        cluster.make_system();
    },
);

fn delete_pod(cluster: &ExclusiveCluster<'_>, pod: &Value) {
    let (namespace, name) = named(pod);
    let delete = ["delete", "pod", "--namespace", namespace, name];
    cluster.kubectl(&delete).unwrap();
}

/// Returns the pod of a DaemonSet on each node, in the order of the nodes.
fn on_each_node(cluster: &ExclusiveCluster<'_>, namespace: &str, label: &str) -> Vec<Value> {
    let mut pods = cluster.pods(namespace, &label.replace(',', "%2C")).unwrap();
    pods.sort_by_key(|pod| text(pod, "/spec/nodeName").to_owned());
    assert_eq!(pods.len(), cluster.machines().len());
    pods
}

fn until_annotated(cluster: &ExclusiveCluster<'_>, pods: &[Value]) {
    for pod in pods {
        let (namespace, name) = named(pod);
        eventually("the pod is redirected", LONG, || {
            let now = cluster.pod(namespace, name)?;
            let shown = "/metadata/annotations/ambient.istio.io~1redirection";
            ensure!(text(&now, shown) == "enabled", "{now}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

/// Returns when each pod has become ready last.
fn ready_since(cluster: &ExclusiveCluster<'_>) -> Vec<(String, String)> {
    let pods = cluster.pods("moved", "").unwrap();
    let since = |pod: &Value| {
        let all = pod.pointer("/status/conditions").and_then(Value::as_array);
        let mut all = all.into_iter().flatten();
        let ready = all.find(|it| text(it, "/type") == "Ready").unwrap();
        (
            named(pod).1.to_owned(),
            text(ready, "/lastTransitionTime").to_owned(),
        )
    };
    pods.iter().map(since).collect()
}

/// Follows the steps 1 to 5 of the page.
fn migrate_to_inpod(cluster: &ExclusiveCluster<'_>, pods: &[Value]) {
    let daemonset = ["delete", "daemonset", "istio-cni-node", "--cascade=orphan"];
    cluster
        .kubectl(&[&daemonset[..], &["--namespace", ISTIO]].concat())
        .unwrap();
    cluster.upgrade(&[]);
    eventually("the chain calls inpod", LONG, || {
        for machine in cluster.machines() {
            let list = std::fs::read_to_string(machine.etc("cni/net.d/02-inpod.conflist")?)?;
            ensure!(list.contains("inpod-cni"), "{list}");
        }
        anyhow::Ok(())
    })
    .unwrap();
    for pod in pods {
        eventually("the pod's probes are exempted", LONG, || {
            let table = ["nft", "list", "table", "inet", "inpod-host"];
            let exempted = cluster.machine_of(pod).exec(&table)?;
            ensure!(exempted.contains(text(pod, "/status/podIP")), "{exempted}");
            anyhow::Ok(())
        })
        .unwrap();
    }
    for (old, new) in on_each_node(cluster, ISTIO, ISTIO_CNI)
        .iter()
        .zip(&on_each_node(cluster, SYSTEM, AGENT))
    {
        delete_pod(cluster, old);
        delete_pod(cluster, new);
    }
    cluster.until_whole();
    for pod in pods {
        cluster.until_found(pod);
    }
    for machine in cluster.machines() {
        let unhealthy = inpod_on(machine, &["pods", "--unhealthy"]).unwrap();
        assert!(unhealthy.lines().count() <= 1, "{unhealthy}");
        let rules = machine.exec(&["nft", "list", "ruleset"]).unwrap();
        assert!(!rules.contains("ISTIO_"), "{rules}");
        let sets = machine.exec(&["ipset", "list", "-name"]).unwrap();
        assert_eq!(sets.trim(), "");
    }
    let uninstall = ["uninstall", "istio-cni", "--namespace", ISTIO];
    cluster.helm(&uninstall).unwrap();
}

/// Follows the way back of the page.
fn migrate_to_istio_cni(cluster: &ExclusiveCluster<'_>, pods: &[Value]) {
    let handover = ["handover", "--timeout", "120s", "--namespace", SYSTEM];
    cluster.person(&handover).unwrap();
    cluster.deploy_chart(
        "istio-cni",
        "istio-cni",
        &["ambient.reconcileIptablesOnStartup=true"],
    );
    let leave = ["uninstall", "inpod", "--no-hooks", "--namespace", SYSTEM];
    cluster.helm(&leave).unwrap();
    cluster.until_ready(ISTIO, ISTIO_CNI, 2).unwrap();
    until_annotated(cluster, pods);
}

#[test]
fn agents_change_and_return_without_lost_requests_or_probes() {
    CLUSTER.use_for(|cluster| {
        make_ambient(cluster, "moved");
        let probe = json!({"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 1});
        let probed = container(&json!({"readinessProbe": probe}));
        let [here, there] = [0, 1].map(|index| cluster.machines().get(index));
        let [single, far] = [("single", here), ("far", there)]
            .map(|(name, node)| App::deploy_with(cluster, ("moved", name), node, 1, &probed));
        let client = App::deploy(cluster, "moved", "client", here, 1).pod();
        let pods = [single.pods(), far.pods(), vec![client.clone()]].concat();
        until_annotated(cluster, &pods);
        let strict = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata:\n  name: strict\n  namespace: moved\nspec: {mtls: {mode: STRICT}}\n";
        cluster.server.apply(strict).unwrap();
        let since = ready_since(cluster);
        let traffic = [&single, &far].map(|app| app.traffic_from(&client));

        migrate_to_inpod(cluster, &pods);
        assert_eq!(ready_since(cluster), since);
        migrate_to_istio_cni(cluster, &pods);
        let next = App::deploy(cluster, "moved", "next", there, 1);
        until_annotated(cluster, &next.pods());
        for traffic in traffic {
            let report = assert_unbroken(traffic);
            eprintln!("{} requests, slowest {:?}", report.answered, report.slowest);
        }
        let mut now = ready_since(cluster);
        now.retain(|(name, _)| !name.starts_with("next"));
        assert_eq!(now, since);
    });
}
