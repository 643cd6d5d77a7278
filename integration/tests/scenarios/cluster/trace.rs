//! inpod's changes to a node and a pod, according to kernel and disk.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::cluster::agent::{ExclusiveCluster, named};

pub(crate) type Answers = BTreeMap<&'static str, String>;

/// A node's disk and network. Empty directories may stay as containers' mount points.
const OF_A_NODE: [&str; 7] = [
    "cd /etc/cni/net.d && ls -A | xargs sha256sum",
    "cd /opt/cni/bin && ls -A | xargs sha256sum",
    "for dir in /run/inpod /var/lib/inpod /var/run/ztunnel; do [ ! -e $dir ] || find $dir -not -type d; done",
    // Sorted, because the kubelet deletes and creates tables of its own in any order. kube-proxy's tables follow the
    // Services.
    "nft list tables | grep -v ' kube-proxy$' | while read -r table; do nft -s list $table; done | sort",
    "ipset list -name",
    "ip rule && ip -6 rule",
    // Pods' routes are in the main table and the kernel's own.
    "(ip route show table all && ip -6 route show table all) | grep ' table ' | grep -v ' table local ' || true",
];

const OF_A_POD: [&str; 6] = [
    "nft -s list ruleset",
    "ipset list -name",
    "ip rule && ip -6 rule",
    "(ip route show table all && ip -6 route show table all) | grep ' table ' | grep -v ' table local ' || true",
    // Without the second column, the number of waiting connections.
    "ss -Hltn | awk '{ $2 = \"\"; print }' | sort",
    // Without unreadable values and those generated for each network.
    "sysctl -a -r '^net[.]ipv[46]' 2>/dev/null | grep -v stable_secret",
];

pub(crate) fn of_the_node(cluster: &ExclusiveCluster<'_>) -> Answers {
    let ask = |question| {
        let answer = cluster.machine().exec(&["sh", "-c", question]);
        (question, answer.unwrap())
    };
    OF_A_NODE.into_iter().map(ask).collect()
}

pub(crate) fn of(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Answers {
    let ask = |question| (question, cluster.in_netns(pod, &["sh", "-c", question]));
    OF_A_POD.into_iter().map(ask).collect()
}

pub(crate) fn annotated(cluster: &ExclusiveCluster<'_>) -> Vec<(String, String)> {
    let pods = cluster.server.get("/api/v1/pods").unwrap();
    let pods = pods.pointer("/items").and_then(Value::as_array).unwrap();
    let says = |pod: &&Value| {
        let annotations = pod.pointer("/metadata/annotations");
        let annotations = annotations.map(Value::to_string).unwrap_or_default();
        annotations.contains("inpod") || annotations.contains("ambient.istio.io")
    };
    let name = |pod: &Value| {
        let (namespace, name) = named(pod);
        (namespace.to_owned(), name.to_owned())
    };
    pods.iter().filter(says).map(name).collect()
}
