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
    kubernetes::{Cluster, Image, LONG, Machine, NodeConfig, ONLY, text},
    tool,
};
use serde_json::Value;

use crate::cluster::trace::{self, Answers};

pub(crate) const SYSTEM: &str = "inpod-system";
pub(crate) const AGENT: &str = "app.kubernetes.io/name=inpod";
pub(crate) const SERVICES: [&str; 4] = ["netconfig", "ztunnel-broker", "pod-events", "installer"];
/// The images that the chart names.
pub(crate) const SHIPPED: [&str; 4] = ["netconfig", "ztunnel-broker", "pod-events", "installer"];

static ONE_NODE: SharedCluster = SharedCluster::new(&[ONLY], &[Image::Ztunnel], |cluster| {
    cluster
        .server
        .apply(include_str!("manifests/ztunnel.yaml"))
        .unwrap();
    cluster.install();
    cluster.until_whole();
});

/// A cluster that the tests of a kind share, one at a time.
pub(crate) struct SharedCluster {
    started: Mutex<Weak<Mutex<Shared>>>,
    nodes: &'static [NodeConfig],
    /// Besides inpod's images and the applications'.
    images: &'static [Image],
    deploy: fn(&ExclusiveCluster<'_>),
}

struct Shared {
    cluster: Cluster,
    clean: Answers,
}

pub(crate) struct ExclusiveCluster<'a>(MutexGuard<'a, Shared>);

pub(crate) fn on_the_node(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    ONE_NODE.use_for(test);
}

impl SharedCluster {
    pub(crate) const fn new(
        nodes: &'static [NodeConfig],
        images: &'static [Image],
        deploy: fn(&ExclusiveCluster<'_>),
    ) -> Self {
        Self {
            started: Mutex::new(Weak::new()),
            nodes,
            images,
            deploy,
        }
    }

    /// Waiting tests keep the cluster alive; the last one ends it.
    pub(crate) fn use_for(&self, test: impl FnOnce(&ExclusiveCluster<'_>)) {
        loop {
            // A cluster with a failed test is not reused.
            if let Ok(shared) = self.start().lock() {
                return test(&ExclusiveCluster(shared));
            }
        }
    }

    fn start(&self) -> Arc<Mutex<Shared>> {
        let mut shared = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = shared.upgrade().filter(|cluster| !cluster.is_poisoned()) {
            return cluster;
        }
        let ours = SHIPPED.map(Image::Shipped);
        let images = [&[Image::Busybox][..], self.images, &ours].concat();
        let started = Arc::new(Mutex::new(Shared {
            cluster: Cluster::start(self.nodes, &images).unwrap(),
            clean: Answers::new(),
        }));
        let mut cluster = ExclusiveCluster(started.lock().unwrap());
        cluster.0.clean = trace::of_the_node(&cluster);
        (self.deploy)(&cluster);
        drop(cluster);
        *shared = Arc::downgrade(&started);
        started
    }
}

impl ExclusiveCluster<'_> {
    /// Waits until agent and ztunnel are connected on every node.
    pub(crate) fn until_whole(&self) {
        let nodes = self.machines().len();
        self.until_ready(SYSTEM, AGENT, nodes).unwrap();
        self.until_ready("istio-system", "app=ztunnel", nodes)
            .unwrap();
        for machine in self.machines() {
            eventually("the services are at one", LONG, || {
                let status = inpod_on(machine, &["status"])?;
                let mut lines = status.lines().map(|line| line.split_whitespace());
                let is_connected = lines.any(|line| line.skip(1).take(2).eq(["ztunnel", "yes"]));
                ensure!(is_connected, "{status}");
                anyhow::Ok(())
            })
            .unwrap();
        }
    }

    /// Returns the first machine, which is the only one in a cluster with one node.
    pub(crate) fn machine(&self) -> &Machine {
        self.machines().first().unwrap()
    }

    /// Returns the machine on which a pod runs.
    pub(crate) fn machine_of(&self, pod: &Value) -> &Machine {
        let node = text(pod, "/spec/nodeName");
        let mut machines = self.machines().iter();
        machines
            .find(|machine| machine.node.name() == node)
            .unwrap()
    }

    pub(crate) fn agent(&self) -> Value {
        let pods = self.until_ready(SYSTEM, AGENT, 1).unwrap();
        pods.first().unwrap().clone()
    }

    /// Runs `inpod` as an operator on the node does.
    pub(crate) fn inpod(&self, arguments: &[&str]) -> anyhow::Result<String> {
        inpod_on(self.machine(), arguments)
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
        explain_on(self.machine(), namespace, name)
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
            let known = explain_on(self.machine_of(pod), namespace, name)?;
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
            let known = explain_on(self.machine_of(pod), namespace, name)?;
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
        let netns = self.machine_of(pod).netns_of(uid(pod)).unwrap();
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
            for machine in self.machines() {
                let known = inpod_on(machine, &["pods"])?;
                ensure!(!known.contains(&format!("{namespace} ")), "{known}");
            }
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

/// Runs `inpod` as an operator on the node does.
pub(crate) fn inpod_on(machine: &Machine, arguments: &[&str]) -> anyhow::Result<String> {
    let program = bin("inpod")?.display().to_string();
    machine.exec(&[&[program.as_str()], arguments].concat())
}

pub(crate) fn explain_on(machine: &Machine, namespace: &str, name: &str) -> anyhow::Result<Value> {
    let pod = format!("{namespace}/{name}");
    let printed = inpod_on(machine, &["explain", &pod, "-o", "json"])?;
    Ok(serde_json::from_str(&printed)?)
}

pub(crate) fn named(pod: &Value) -> (&str, &str) {
    (
        text(pod, "/metadata/namespace"),
        text(pod, "/metadata/name"),
    )
}

/// Returns the status of a pod's container.
pub(crate) fn status_of<'a>(pod: &'a Value, container: &str) -> anyhow::Result<&'a Value> {
    let all = pod.pointer("/status/containerStatuses");
    let mut all = all.and_then(Value::as_array).into_iter().flatten();
    all.find(|status| text(status, "/name") == container)
        .with_context(|| format!("{container} has no status"))
}

/// Returns the kubelet's UID, which for a static pod is its hash.
pub(crate) fn uid(pod: &Value) -> &str {
    match text(pod, "/metadata/annotations/kubernetes.io~1config.hash") {
        "" => text(pod, "/metadata/uid"),
        hash => hash,
    }
}
