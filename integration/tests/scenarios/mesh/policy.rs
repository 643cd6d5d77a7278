//! Network policies that a real engine, kube-router, enforces beside inpod, for IPv4.

use anyhow::ensure;
use integration::{
    TIMEOUT, eventually,
    kubernetes::{LONG, Machine, ask, get, is},
};
use serde_json::{Value, json};

use crate::{
    cluster::{
        agent::{ExclusiveCluster, named},
        apps::{PORT, address, container},
        probes::{PROBE, seen},
    },
    common::policy_table::{self, Row},
    mesh::{
        apps::{App, make_ambient, netns_of, until_enrolled},
        control::on_policy_engine,
        wire::Wire,
    },
};

const POLICIES: &str = "/apis/networking.k8s.io/v1/namespaces/guarded/networkpolicies";

/// The path whose clients the application records.
const RECORDED: &str = "/cgi-bin/who";

/// Deploys an application with a probe on each node, and returns the pods in the order of the nodes.
fn one_on_each_node(cluster: &ExclusiveCluster<'_>, namespace: &str) -> Vec<Value> {
    let probe = json!({"httpGet": {"path": RECORDED, "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5});
    let container = container(&json!({"readinessProbe": probe}));
    let deploy = |machine: &Machine| {
        let name = machine.node.name();
        App::deploy_with(cluster, (namespace, &name), Some(machine), 1, &container).pod()
    };
    cluster.machines().iter().map(deploy).collect()
}

/// Returns the ingress rule for an entry of the install page's table.
fn ingress_rule(row: &Row) -> Value {
    let peer = match row.peer {
        None => {
            json!({"namespaceSelector": {"matchLabels": {"istio.io/dataplane-mode": "ambient"}}})
        }
        Some(address) => {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            json!({"ipBlock": {"cidr": format!("{address}/{bits}")}})
        }
    };
    let port = row.port.unwrap_or(PORT);
    json!({"from": [peer], "ports": [{"protocol": "TCP", "port": port}]})
}

/// Returns the pairs of two pods on different nodes.
fn across_nodes(pods: &[Value]) -> impl Iterator<Item = (&Value, &Value)> {
    pods.iter().zip(pods.iter().rev())
}

/// Calls the server, and expects the client's address in the answer.
fn reach(cluster: &ExclusiveCluster<'_>, client: &Value, server: &Value) -> anyhow::Result<()> {
    let (from, body) = ask(&netns_of(cluster, client), address(server), RECORDED)?;
    ensure!(
        body.contains(&from.ip().to_string()),
        "the application saw {body} in place of {from}"
    );
    Ok(())
}

/// Expects that the server does not answer.
fn refuse(cluster: &ExclusiveCluster<'_>, client: &Value, server: &Value) -> anyhow::Result<()> {
    let answer = get(&netns_of(cluster, client), address(server));
    ensure!(answer.is_err(), "{} answers", address(server));
    Ok(())
}

/// Returns what `kubectl inpod explain` prints.
fn explain(cluster: &ExclusiveCluster<'_>, pod: &Value) -> String {
    let (namespace, name) = named(pod);
    let output = cluster.kubectl_inpod(&["explain", &format!("{namespace}/{name}")]);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Expects that probes pass, and that nothing but probes reached the application since its first `before` clients.
fn is_only_probed(cluster: &ExclusiveCluster<'_>, pod: &Value, before: usize) {
    eventually("probes pass the policy", TIMEOUT, || {
        let clients = seen(cluster, pod)?.split_off(before);
        assert!(clients.iter().all(|it| it.contains(PROBE)), "{clients:?}");
        ensure!(clients.len() > 5, "{clients:?}");
        let (namespace, name) = named(pod);
        assert!(is(&cluster.pod(namespace, name)?, "Ready"));
        anyhow::Ok(())
    })
    .unwrap();
}

/// Expects that pods cannot reach each other, neither by HBONE nor in plaintext, and that inpod names the cause.
fn hbone_is_closed(cluster: &ExclusiveCluster<'_>, pods: &[Value], wire: &Wire<'_>) {
    let before: Vec<_> = pods
        .iter()
        .map(|pod| seen(cluster, pod).unwrap().len())
        .collect();
    for (client, server) in across_nodes(pods) {
        refuse(cluster, client, server).unwrap();
        let printed = explain(cluster, server);
        let sentence = "The network policy closed selects this pod and admits no TCP port 15008";
        assert!(printed.contains(sentence), "{printed}");
    }
    assert_eq!(wire.packets().unwrap().plaintext, 0);
    for (pod, before) in pods.iter().zip(before) {
        is_only_probed(cluster, pod, before);
    }
}

#[test]
fn kube_router_policy_admits_hbone_only_by_port_15008() {
    on_policy_engine(|cluster| {
        make_ambient(cluster, "guarded");
        cluster.make_namespace("plain", &json!({})).unwrap();
        let guarded = one_on_each_node(cluster, "guarded");
        let plain = one_on_each_node(cluster, "plain");
        let every_pair = || {
            let servers = |client| guarded.iter().map(move |server| (client, server));
            plain.iter().flat_map(servers)
        };
        until_enrolled(cluster, &guarded);
        for (client, server) in every_pair() {
            reach(cluster, client, server).unwrap();
        }

        let mut rows = policy_table::rows();
        rows.retain(|row| row.direction == "ingress");
        let (probes, hbone): (Vec<Row>, Vec<Row>) =
            rows.iter().copied().partition(|row| row.port.is_none());
        assert_eq!((probes.len(), hbone.len()), (2, 1), "{rows:?}");
        // The policy denies everything but its rules, which at first are those for probes.
        let rules: Vec<_> = probes.iter().map(ingress_rule).collect();
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules});
        let policy = json!({"metadata": {"name": "closed"}, "spec": spec});
        cluster.server.create(POLICIES, &policy).unwrap();
        for (client, server) in every_pair() {
            eventually(
                "kube-router refuses a pod outside of the mesh",
                LONG,
                || refuse(cluster, client, server),
            )
            .unwrap();
        }
        let wire = Wire::watch(cluster).unwrap();
        hbone_is_closed(cluster, &guarded, &wire);

        let rules: Vec<_> = rows.iter().map(ingress_rule).collect();
        let change = json!({"spec": {"ingress": rules}});
        cluster
            .server
            .patch(&format!("{POLICIES}/closed"), &change)
            .unwrap();
        for (client, server) in across_nodes(&guarded) {
            eventually("kube-router admits HBONE", LONG, || {
                reach(cluster, client, server)
            })
            .unwrap();
            let printed = explain(cluster, server);
            assert!(!printed.contains("Network policies"), "{printed}");
        }
        let packets = wire.packets().unwrap();
        assert!(packets.hbone > 0 && packets.plaintext == 0, "{packets:?}");
        for (client, server) in every_pair() {
            refuse(cluster, client, server).unwrap();
        }
        cluster.remove("plain");
        cluster.remove("guarded");
    });
}
