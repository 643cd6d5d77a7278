//! Identities that istiod issues: ztunnels prove identities to each other, and policies refuse by them.

use anyhow::ensure;
use integration::{
    Carried, TIMEOUT, eventually,
    kubernetes::{ask, get},
};
use serde_json::{Value, json};

use crate::{
    cluster::{
        agent::{ExclusiveCluster, uid},
        apps::{PORT, address, container},
        probes::{PROBE, seen},
    },
    mesh::{
        apps::{App, addresses, execute, make_ambient, netns_of, until_enrolled},
        control::{ISTIO, on_stock_ztunnels},
        wire::Wire,
    },
};

const NAMES: [&str; 3] = ["web", "web.shop", "web.shop.svc.cluster.local"];

/// Returns the connections in the log of the ztunnel beside a pod.
pub(crate) fn carried(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Vec<Carried> {
    let machine = cluster.machine_of(pod);
    let ztunnels = cluster.pods(ISTIO, "app=ztunnel").unwrap();
    let beside = |ztunnel: &&Value| cluster.machine_of(ztunnel).node == machine.node;
    let ztunnel = ztunnels.iter().find(beside).unwrap();
    let log = machine.log_of(uid(ztunnel)).unwrap();
    // The runtime puts time, stream and a tag before each line.
    let lines = log.lines().filter_map(|line| line.split_once(" F "));
    lines.filter_map(|(_, line)| Carried::parse(line)).collect()
}

fn identity(name: &str) -> Option<String> {
    Some(format!("spiffe://cluster.local/ns/shop/sa/{name}"))
}

fn apply(cluster: &ExclusiveCluster<'_>, namespace: &str, kind: &str, name: &str, spec: &str) {
    let document = format!(
        "apiVersion: security.istio.io/v1\nkind: {kind}\nmetadata:\n  name: {name}\n  namespace: {namespace}\nspec: {spec}\n"
    );
    cluster.server.apply(&document).unwrap();
}

pub(crate) fn demand_mutual_tls(cluster: &ExclusiveCluster<'_>, namespace: &str) {
    let strict = "{mtls: {mode: STRICT}}";
    apply(cluster, namespace, "PeerAuthentication", "strict", strict);
}

#[test]
fn pods_of_two_nodes_prove_identities_and_send_only_hbone() {
    on_stock_ztunnels(|cluster| {
        make_ambient(cluster, "shop");
        cluster.make_namespace("plain", &json!({})).unwrap();
        let [here, there] = [0, 1].map(|index| cluster.machines().get(index));
        let web = App::deploy(cluster, "shop", "web", there, 1);
        let client = App::deploy(cluster, "shop", "client", here, 1);
        let outsider = App::deploy(cluster, "plain", "outsider", here, 1);
        let (server, client, outsider) = (web.pod(), client.pod(), outsider.pod());
        until_enrolled(cluster, &[server.clone(), client.clone()]);
        let netns = netns_of(cluster, &client);
        let wire = Wire::watch(cluster).unwrap();
        let direct = addresses(&server);
        assert_eq!(direct.len(), 2, "{server}");
        for to in [direct.clone(), web.virtual_addresses()].concat() {
            let (from, seen) = ask(&netns, to, "/cgi-bin/who").unwrap();
            assert!(seen.contains(&from.ip().to_string()), "{seen}");
            for (end, is_outbound) in [(&client, true), (&server, false)] {
                eventually("ztunnel's log has the connection", TIMEOUT, || {
                    let all = carried(cluster, end);
                    let is_meant = |it: &&Carried| {
                        it.is_outbound == is_outbound
                            && it.source_identity == identity("client")
                            && it.destination_identity == identity("web")
                            && it.hbone.is_some_and(|hbone| {
                                direct.contains(&hbone) && hbone.is_ipv4() == to.is_ipv4()
                            })
                            && it.error.is_none()
                    };
                    ensure!(all.iter().any(|it| is_meant(&it)), "{all:?}");
                    anyhow::Ok(())
                })
                .unwrap();
            }
        }
        for name in NAMES {
            let url = format!("http://{name}/");
            let answer = execute(cluster, &client, &["wget", "-qO-", &url]).unwrap();
            assert_eq!(answer.trim(), "here", "{name}");
        }
        let packets = wire.packets().unwrap();
        assert!(packets.hbone > 0 && packets.plaintext == 0, "{packets:?}");
        // Negative control: a client outside the mesh.
        get(&netns_of(cluster, &outsider), address(&server)).unwrap();
        assert!(wire.packets().unwrap().plaintext > 0);
        cluster.remove("shop");
        cluster.remove("plain");
    });
}

#[test]
fn strict_policy_admits_only_identities_and_probes() {
    on_stock_ztunnels(|cluster| {
        make_ambient(cluster, "shop");
        let [here, there] = [0, 1].map(|index| cluster.machines().get(index));
        let probed = container(&json!({
            "readinessProbe": {"httpGet": {"path": "/cgi-bin/who", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5},
        }));
        let web = App::deploy_with(cluster, ("shop", "web"), there, 1, &probed);
        let client = App::deploy(cluster, "shop", "client", here, 1).pod();
        let other = App::deploy(cluster, "shop", "other", here, 1).pod();
        let server = web.pod();
        until_enrolled(cluster, &[server.clone(), client.clone(), other.clone()]);
        let (client, other) = (netns_of(cluster, &client), netns_of(cluster, &other));
        let to = web.virtual_address();
        get(&other, to).unwrap();
        let principal = "cluster.local/ns/shop/sa/other";
        let deny = format!(
            "{{action: DENY, rules: [{{from: [{{source: {{principals: [{principal}]}}}}]}}]}}"
        );
        apply(cluster, "shop", "AuthorizationPolicy", "deny", &deny);
        eventually("the identity is refused", TIMEOUT, || {
            ensure!(get(&other, to).is_err(), "it is answered");
            anyhow::Ok(())
        })
        .unwrap();
        get(&client, to).unwrap();
        get(&cluster.outside, address(&server)).unwrap();
        demand_mutual_tls(cluster, "shop");
        eventually("plaintext is refused", TIMEOUT, || {
            ensure!(
                get(&cluster.outside, address(&server)).is_err(),
                "it is answered"
            );
            anyhow::Ok(())
        })
        .unwrap();
        get(&client, to).unwrap();
        let probes = || {
            seen(cluster, &server)
                .unwrap()
                .iter()
                .filter(|it| it.contains(PROBE))
                .count()
        };
        let before = probes();
        eventually("the kubelet probes the pod", TIMEOUT, || {
            ensure!(probes() > before + 3, "{} before, {} now", before, probes());
            anyhow::Ok(())
        })
        .unwrap();
        web.pod();
        cluster.remove("shop");
    });
}
