//! What inpod changes on a node and in a pod, asked of the kernel and of the disk.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::agent::{Turn, named};

/// What each question is answered.
pub(crate) type Answers = BTreeMap<&'static str, String>;

/// Of a node's disk and network. Empty directories may stay: they are the mounts of containers.
const OF_A_NODE: [&str; 7] = [
    "cd /etc/cni/net.d && ls -A | xargs sha256sum",
    "cd /opt/cni/bin && ls -A | xargs sha256sum",
    "for dir in /run/inpod /var/lib/inpod /var/run/ztunnel; do [ ! -e $dir ] || find $dir -not -type d; done",
    "nft -s list ruleset",
    "ipset list -name",
    "ip rule && ip -6 rule",
    // Pods come and go: their routes are those of the main table and of the kernel's own.
    "(ip route show table all && ip -6 route show table all) | grep ' table ' | grep -v ' table local ' || true",
];

/// Of a pod's network.
const OF_A_POD: [&str; 6] = [
    "nft -s list ruleset",
    "ipset list -name",
    "ip rule && ip -6 rule",
    "(ip route show table all && ip -6 route show table all) | grep ' table ' | grep -v ' table local ' || true",
    // Without the second column: how many connections wait at this moment is the traffic's.
    "ss -Hltn | awk '{ $2 = \"\"; print }' | sort",
    // What cannot be read, and what is made up for each network.
    "sysctl -a -r '^net[.]ipv[46]' 2>/dev/null | grep -v stable_secret",
];

/// What there is on the node.
pub(crate) fn of_the_node(turn: &Turn<'_>) -> Answers {
    let ask = |question| {
        let answer = turn.machine.exec(&["sh", "-c", question]);
        (question, answer.unwrap())
    };
    OF_A_NODE.into_iter().map(ask).collect()
}

/// What there is in a pod.
pub(crate) fn of(turn: &Turn<'_>, pod: &Value) -> Answers {
    let ask = |question| (question, turn.in_netns(pod, &["sh", "-c", question]));
    OF_A_POD.into_iter().map(ask).collect()
}

/// Every pod whose annotation says something of inpod.
pub(crate) fn annotated(turn: &Turn<'_>) -> Vec<(String, String)> {
    let pods = turn.server.get("/api/v1/pods").unwrap();
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
