//! With `startup_taints`, pod-events removes these taints from its Node once the agent is ready, and the rights and the
//! policy of the chart admit nothing else.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{Act, ApiServer, TIMEOUT, Verb, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::{
    cluster::Cluster,
    installer_host::{Host, PRIMARY},
};

const MANIFEST: &str = include_str!("../../../../deploy/manifests/startup-taints.yaml");

const OURS: &str = "inpod.io/not-ready";
const ISTIO: &str = "cni.istio.io/not-ready";
const FOREIGN: &str = "example.com/not-ready";

const SETTING: &str = "inpod.io/not-ready,cni.istio.io/not-ready";

/// Until a new server enforces a policy on a busy machine.
const IN_FORCE: Duration = Duration::from_secs(120);

const PATCH: (&str, &str) = ("PATCH", "application/merge-patch+json");

/// Grants the rights once, under names of their own beside the rights of the other tests.
fn grant(server: &ApiServer) {
    static GRANTED: Mutex<bool> = Mutex::new(false);
    let mut granted = GRANTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*granted {
        let documents = MANIFEST.split("\n---\n").skip(1);
        let is_right = |document: &&str| !document.contains("kind: DaemonSet");
        let rights: Vec<_> = documents.filter(is_right).collect();
        let renamed = rights.join("\n---\n");
        let renamed = renamed.replace("inpod-pod-events", "inpod-startup-taints");
        server.apply(&renamed).unwrap();
        *granted = true;
    }
}

fn taint(key: &str, effect: &str) -> Value {
    json!({"key": key, "effect": effect})
}

fn path(node: &str) -> String {
    format!("/api/v1/nodes/{node}")
}

fn register(server: &ApiServer, node: &str) {
    let taints = [
        taint(OURS, "NoSchedule"),
        taint(FOREIGN, "NoSchedule"),
        taint(ISTIO, "NoExecute"),
    ];
    let metadata = json!({"name": node, "labels": {"pool": "a"}});
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}});
    server.create("/api/v1/nodes", &object).unwrap();
}

/// Returns the keys of the Node's taints, without those of Kubernetes itself.
fn keys(server: &ApiServer, node: &str) -> Vec<String> {
    let node = server.get(&path(node)).unwrap();
    let taints = node.pointer("/spec/taints").and_then(Value::as_array);
    let keys = taints
        .into_iter()
        .flatten()
        .filter_map(|it| it["key"].as_str());
    keys.filter(|key| !key.contains("kubernetes.io"))
        .map(str::to_owned)
        .collect()
}

fn until_open(cluster: &Cluster) {
    eventually("the start-up taints are gone", TIMEOUT, || {
        let found = keys(&cluster.server, cluster.node.name());
        ensure!(found == [FOREIGN], "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

fn until_condition(cluster: &Cluster, ok: bool, part: &str) {
    eventually("the condition startup-taints", TIMEOUT, || {
        let status = cluster.node.api().status()?;
        let mut all = status.conditions.into_iter();
        let found = all.find(|found| found.name == "startup-taints");
        let found = found.context("there is none")?;
        let is_wanted = found.ok == ok && found.message.contains(part);
        ensure!(is_wanted, "{found:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Starts an installer, which is ready once the host's directory holds a primary.
fn start_installer(cluster: &Cluster, host: &Host) {
    let at = |name: &str, path: &str| format!("--{name}={}", host.path(path).display());
    let settings = [
        at("host-root", ""),
        at("plugin-source", "image/inpod-cni"),
        at("leave-file", "leave"),
        at("receipt-file", "receipt"),
        "--binary-grace-seconds=0".to_owned(),
        "--peer=uid".to_owned(),
    ];
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    cluster.node.start_with("installer", &settings).unwrap();
}

fn start_pod_events(cluster: &Cluster, settings: &[&str]) {
    let settings = [&["--peer=uid"][..], settings].concat();
    cluster.node.start_with("pod-events", &settings).unwrap();
}

#[test]
fn startup_taints_stay_until_every_service_is_ready() {
    let (cluster, proxy) = Cluster::behind_proxy();
    grant(&cluster.server);
    let other = format!("{}-other", cluster.node.name());
    for node in [cluster.node.name(), other.as_str()] {
        register(&cluster.server, node);
    }
    let tainted = [OURS, FOREIGN, ISTIO];
    cluster.node.start("ztunnel-broker").unwrap();
    let setting = format!("--startup-taints={SETTING}");
    start_pod_events(&cluster, &[&setting]);
    until_condition(&cluster, false, "pod-events is not ready");
    cluster.node.start("netconfig").unwrap();
    until_condition(&cluster, false, "/installer/grpc.sock");
    let host = Host::new(&[]);
    start_installer(&cluster, &host);
    until_condition(&cluster, false, "installer is not ready: ");
    // pod-events keeps its stream to a stopped netconfig, so pod-events itself is ready.
    cluster.node.signal("netconfig", Signal::SIGSTOP).unwrap();
    host.put("10-calico.conflist", PRIMARY);
    cluster.node.healthy("installer").unwrap();
    until_condition(&cluster, false, "/netconfig/grpc.sock");
    assert_eq!(keys(&cluster.server, cluster.node.name()), tainted);
    assert!(proxy.asked(Verb::Get, "nodes").is_empty(), "no request yet");
    cluster.node.signal("netconfig", Signal::SIGCONT).unwrap();
    until_condition(&cluster, true, "");
    until_open(&cluster);
    assert_eq!(keys(&cluster.server, &other), tainted);
    let log = cluster.node.tail("pod-events", usize::MAX);
    assert_eq!(log.matches("Removed the start-up taints").count(), 1);
}

#[test]
fn a_refused_removal_of_startup_taints_is_a_condition() {
    let (cluster, proxy) = Cluster::behind_proxy();
    grant(&cluster.server);
    let host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    start_installer(&cluster, &host);
    cluster.node.start("ztunnel-broker").unwrap();
    cluster.node.start("netconfig").unwrap();
    let setting = format!("--startup-taints={SETTING}");
    start_pod_events(&cluster, &[&setting]);
    until_condition(&cluster, false, "there is no Node");
    assert!(cluster.node.api().status().unwrap().ready);
    register(&cluster.server, cluster.node.name());
    let restart = |act| {
        cluster.node.stop("pod-events", Signal::SIGTERM).unwrap();
        proxy.fault(Verb::Patch, "nodes", 1, act);
        start_pod_events(&cluster, &[&setting]);
    };
    restart(Act::Refuse(403, None));
    until_condition(&cluster, false, "startupTaints");
    // Another client's change between the read and the patch is a conflict, after which the Node is read again.
    restart(Act::Refuse(409, None));
    until_open(&cluster);
}

#[test]
fn without_the_setting_pod_events_never_reads_a_node() {
    let (cluster, proxy) = Cluster::behind_proxy();
    grant(&cluster.server);
    register(&cluster.server, cluster.node.name());
    let host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    start_installer(&cluster, &host);
    cluster.start();
    for service in ["netconfig", "installer"] {
        cluster.node.healthy(service).unwrap();
    }
    assert!(proxy.asked(Verb::Get, "nodes").is_empty());
    let tainted = [OURS, FOREIGN, ISTIO];
    assert_eq!(keys(&cluster.server, cluster.node.name()), tainted);
}

/// A node's token, which has the rights that the chart grants with startupTaints.
struct Token {
    server: Arc<ApiServer>,
    token: String,
    node: String,
}

impl Token {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let server = ApiServer::shared().unwrap();
        grant(&server);
        let node = format!("startup-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        for name in [&node, &format!("{node}-other")] {
            register(&server, name);
        }
        let token = server.token(&node).unwrap();
        let token = Self {
            server,
            token,
            node,
        };
        eventually("the policy is in force", IN_FORCE, || {
            let probe = json!({"metadata": {"labels": {"probe": "1"}}});
            let asked = token.patch(&format!("{}?dryRun=All", token.node), &probe);
            let refused = format!("{:#}", asked.err().context("not yet")?);
            ensure!(refused.contains("nothing of a Node"), "{refused}");
            anyhow::Ok(())
        })
        .unwrap();
        token
    }

    fn patch(&self, node: &str, change: &Value) -> anyhow::Result<Value> {
        let path = path(node);
        self.server.ask_as(&self.token, PATCH, &path, change)
    }

    fn refuses(&self, node: &str, change: &Value, words: &str) {
        let refused = self.patch(node, change).unwrap_err();
        let refused = format!("{refused:#}");
        assert!(refused.contains(words), "{change}: {refused}");
    }
}

fn with_taints(taints: &[Value]) -> Value {
    json!({"spec": {"taints": taints}})
}

#[test]
fn the_policy_admits_only_the_removal_of_startup_taints() {
    let token = Token::new();
    let node = token.node.clone();
    let now = token.server.get(&path(&node)).unwrap();
    let all = now.pointer("/spec/taints").and_then(Value::as_array);
    let all = all.unwrap().clone();
    let without = |key: &str| {
        let others = all.iter().filter(|taint| taint["key"] != key);
        others.cloned().collect::<Vec<_>>()
    };
    let other = format!("{node}-other");
    token.refuses(&other, &with_taints(&without(OURS)), "its own Node only");
    token.refuses(
        &node,
        &with_taints(&without(FOREIGN)),
        "removes no taint but",
    );
    let more = [&all[..], &[taint("example.com/more", "NoSchedule")]].concat();
    token.refuses(&node, &with_taints(&more), "neither adds nor changes");
    let changed = [&without(OURS)[..], &[taint(OURS, "PreferNoSchedule")]].concat();
    token.refuses(&node, &with_taints(&changed), "neither adds nor changes");
    for change in [
        json!({"metadata": {"labels": {"pool": "b"}}}),
        json!({"metadata": {"annotations": {"mine": "1"}}}),
        json!({"metadata": {"finalizers": ["example.com/stay"]}}),
        json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "a"}]}}),
        json!({"spec": {"unschedulable": true}}),
        json!({"spec": {"providerID": "example://a"}}),
    ] {
        token.refuses(&node, &change, "nothing of a Node but its taints");
    }
    let status = json!({"status": {"nodeInfo": {"machineID": "a"}}});
    token.refuses(&format!("{node}/status"), &status, "cannot patch resource");
    token.patch(&node, &with_taints(&without(OURS))).unwrap();
    assert_eq!(keys(&token.server, &node), [FOREIGN, ISTIO]);
    token
        .server
        .patch(&path(&other), &with_taints(&[]))
        .unwrap();
}
