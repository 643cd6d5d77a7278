//! The cluster with inpod, used by one test at a time.

use std::{
    ops::Deref,
    path::Path,
    process::Output,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use anyhow::{Context as _, ensure};
use integration::{
    TIMEOUT, bin, eventually,
    kubernetes::{Cluster, Image, LONG, text},
    tool,
};
use serde_json::Value;

use crate::cluster::trace::{self, Answers};

pub(crate) const SYSTEM: &str = "inpod-system";
pub(crate) const AGENT: &str = "app.kubernetes.io/name=inpod";
pub(crate) const SERVICES: [&str; 4] = ["netconfig", "ztunnel-broker", "pod-events", "installer"];
/// The images that the chart names.
pub(crate) const SHIPPED: [&str; 4] = ["netconfig", "ztunnel-broker", "pod-events", "installer"];

static SHARED: Mutex<Weak<Mutex<Shared>>> = Mutex::new(Weak::new());

pub(crate) struct Shared {
    cluster: Cluster,
    pub(crate) clean: Answers,
}

pub(crate) struct ExclusiveCluster<'a>(MutexGuard<'a, Shared>);

/// Waiting tests keep the cluster alive; the last one ends it.
pub(crate) fn on_the_node(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    loop {
        // A cluster with a failed test is not reused.
        if let Ok(shared) = shared().lock() {
            return test(&ExclusiveCluster(shared));
        }
    }
}

fn shared() -> Arc<Mutex<Shared>> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = shared.upgrade().filter(|cluster| !cluster.is_poisoned()) {
        return cluster;
    }
    let ours = SHIPPED.map(Image::Shipped);
    let images = [&[Image::Busybox, Image::Ztunnel][..], &ours].concat();
    let started = Arc::new(Mutex::new(Shared {
        cluster: Cluster::start(&images).unwrap(),
        clean: Answers::new(),
    }));
    let mut cluster = ExclusiveCluster(started.lock().unwrap());
    cluster.0.clean = trace::of_the_node(&cluster);
    cluster
        .server
        .apply(include_str!("manifests/ztunnel.yaml"))
        .unwrap();
    cluster.install();
    cluster.until_whole();
    drop(cluster);
    *shared = Arc::downgrade(&started);
    started
}

impl ExclusiveCluster<'_> {
    /// Waits until agent and ztunnel are connected.
    pub(crate) fn until_whole(&self) {
        self.until_ready(SYSTEM, AGENT, 1).unwrap();
        self.until_ready("istio-system", "app=ztunnel", 1).unwrap();
        eventually("the services are at one", LONG, || {
            let status = self.inpod(&["status"])?;
            let words: Vec<Vec<_>> = status
                .lines()
                .map(|line| line.split_whitespace().collect())
                .collect();
            let is_told = words
                .iter()
                .any(|line| line.get(1..3) == Some(&["ztunnel", "yes"]));
            ensure!(is_told, "{status}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn agent(&self) -> Value {
        let pods = self.until_ready(SYSTEM, AGENT, 1).unwrap();
        pods.first().unwrap().clone()
    }

    /// Runs `inpod` as an operator on the node does.
    pub(crate) fn inpod(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let program = bin("inpod")?.display().to_string();
        self.machine
            .exec(&[&[program.as_str()], arguments].concat())
    }

    /// Runs `deploy/kubectl-inpod` as a person outside the node does.
    pub(crate) fn kubectl_inpod(&self, arguments: &[&str]) -> Output {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubectl-inpod");
        let mut command = self.server.beside(Path::new(script));
        command
            .args(arguments)
            .env("KUBECTL", tool("KUBECTL").unwrap())
            .env("KUBECONFIG", self.kubeconfig());
        command.output().unwrap()
    }

    pub(crate) fn explain(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        let printed = self.inpod(&["explain", &format!("{namespace}/{name}"), "-o", "json"])?;
        Ok(serde_json::from_str(&printed)?)
    }

    /// The node before the first install.
    pub(crate) fn clean(&self) -> &Answers {
        &self.0.clean
    }

    pub(crate) fn until_enrolled(&self, pod: &Value) {
        self.until_in(pod, "podnet");
    }

    /// Waits for a pod that started without an agent.
    pub(crate) fn until_found(&self, pod: &Value) {
        self.until_in(pod, "");
    }

    fn until_in(&self, pod: &Value, expected: &str) {
        let (namespace, name) = named(pod);
        eventually("the pod is in the mesh", TIMEOUT, || {
            let known = self.explain(namespace, name)?;
            let state = text(&known, "/state");
            ensure!(state == "POD_STATE_ENROLLED", "{known}");
            let network = text(&known, "/sandbox/networkName");
            ensure!(network == expected, "{known}");
            let rules = known.pointer("/rules").context("no rules")?;
            ensure!(
                rules
                    .get("differences")
                    .is_none_or(|it| it == &serde_json::json!([])),
                "{rules}"
            );
            let object = self.pod(namespace, name)?;
            let shown = text(
                &object,
                "/metadata/annotations/ambient.istio.io~1redirection",
            );
            ensure!(shown == "enabled", "the annotation is {shown:?}");
            anyhow::Ok(())
        })
        .unwrap();
        let tables = self.in_netns(pod, &["nft", "list", "tables"]);
        assert!(tables.contains("inpod-nat"), "{tables}");
        let listening = self.in_netns(pod, &["ss", "-Hltn"]);
        for port in [15001, 15006, 15008] {
            assert!(listening.contains(&format!(":{port} ")), "{listening}");
        }
    }

    /// Waits until no source reports that a running pod is in the mesh.
    pub(crate) fn until_outside(&self, pod: &Value) {
        let (namespace, name) = named(pod);
        eventually("the pod is outside of the mesh", LONG, || {
            let known = self.explain(namespace, name)?;
            ensure!(text(&known, "/state") == "POD_STATE_OUT", "{known}");
            let object = self.pod(namespace, name)?;
            let shown = text(
                &object,
                "/metadata/annotations/ambient.istio.io~1redirection",
            );
            ensure!(shown.is_empty(), "the annotation is {shown:?}");
            let tables = self.in_netns(pod, &["nft", "list", "tables"]);
            ensure!(!tables.contains("inpod"), "{tables}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn in_netns(&self, pod: &Value, command: &[&str]) -> String {
        let netns = self.machine.netns_of(uid(pod)).unwrap();
        let net = format!("--net={}", netns.path().display());
        integration::run("nsenter", &[&[net.as_str()], command].concat()).unwrap()
    }

    /// Waits until the agent knows no pod of it.
    pub(crate) fn remove(&self, namespace: &str) {
        self.server
            .delete(&format!("/api/v1/namespaces/{namespace}"))
            .unwrap();
        eventually("the namespace is gone", LONG, || {
            let found = self.server.get(&format!("/api/v1/namespaces/{namespace}"));
            ensure!(found.is_err(), "{found:?}");
            let known = self.inpod(&["pods"])?;
            ensure!(!known.contains(&format!("{namespace} ")), "{known}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

impl Deref for ExclusiveCluster<'_> {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0.cluster
    }
}

impl Drop for ExclusiveCluster<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.diagnostics());
        }
    }
}

pub(crate) fn named(pod: &Value) -> (&str, &str) {
    (
        text(pod, "/metadata/namespace"),
        text(pod, "/metadata/name"),
    )
}

/// Returns the kubelet's UID, which for a static pod is its hash.
pub(crate) fn uid(pod: &Value) -> &str {
    match text(pod, "/metadata/annotations/kubernetes.io~1config.hash") {
        "" => text(pod, "/metadata/uid"),
        hash => hash,
    }
}
