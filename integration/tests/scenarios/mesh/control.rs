//! The control plane, from Istio's charts, and what every test of the mesh ends with.

use std::path::Path;

use anyhow::{Context as _, ensure};
use integration::{
    eventually,
    kubernetes::{Chain, Image, LONG, NodeConfig, ProxyMode, text},
};
use serde_json::Value;

use crate::cluster::agent::{AGENT, ExclusiveCluster, SYSTEM, SharedCluster};

pub(crate) const ISTIO: &str = "istio-system";

/// Prints the pods that are being deleted.
const ENDING: &str =
    "jsonpath={range .items[?(@.metadata.deletionTimestamp)]}{.metadata.name} {end}";

pub(crate) const ISTIOD: Image = Image::Tool {
    name: "pilot",
    variable: "PILOT_DISCOVERY",
};
pub(crate) const COREDNS: Image = Image::Tool {
    name: "coredns",
    variable: "COREDNS",
};

/// Two nodes with stock ztunnels.
static STOCK: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
    ],
    &[ISTIOD, COREDNS, Image::StockZtunnel],
    |cluster| {
        cluster.deploy_control_plane(&[]);
        cluster.deploy_ztunnel("ztunnel");
        cluster.install();
        cluster.until_whole();
    },
);

/// The values by which istiod leaves Istio's own filters out of a sidecar's configuration, because only Istio's Envoy has
/// them, and leaves the redirection to the node.
pub(crate) const SIDECARS: [&str; 8] = [
    "cni.enabled=true",
    "telemetry.enabled=false",
    "env.PILOT_ENABLE_METADATA_EXCHANGE=false",
    "env.PILOT_ENABLE_ALPN_FILTER=false",
    // Helm would take `false` for a boolean, where Istio wants a text.
    "meshConfig.defaultConfig.proxyMetadata.PEER_METADATA_DISCOVERY=F",
    // For older proxies, istiod uses types of filter state that every Envoy has.
    "meshConfig.defaultConfig.proxyMetadata.ISTIO_META_ISTIO_VERSION=1.29.1",
    "meshConfig.accessLogFile=/dev/stdout",
    "global.proxy.resources.requests.cpu=10m",
];

/// The same with Istio's injector, and proxies.
static PROXIES: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
    ],
    &[ISTIOD, COREDNS, Image::StockZtunnel, Image::Proxy],
    |cluster| {
        cluster.deploy_control_plane(&SIDECARS);
        let hbone = include_str!("manifests/hbone.yaml");
        cluster.server.apply(hbone).unwrap();
        cluster.deploy_ztunnel("ztunnel");
        cluster.install();
        cluster.until_whole();
    },
);

/// The same as [`STOCK`] with an engine of network policies.
static POLICY_ENGINE: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
    ],
    &[ISTIOD, COREDNS, Image::StockZtunnel, Image::KubeRouter],
    |cluster| {
        cluster.deploy_control_plane(&[]);
        cluster.deploy_ztunnel("ztunnel");
        cluster.install();
        cluster.until_whole();
        let engine = include_str!("manifests/kube-router.yaml");
        cluster.server.apply(engine).unwrap();
        cluster
            .until_ready("kube-system", "app=kube-router", 2)
            .unwrap();
    },
);

/// A node for each kind of pod network, with reference ztunnels.
static NETWORKS: SharedCluster = SharedCluster::new(
    &[
        NodeConfig::new(1, Chain::Bridge, ProxyMode::Iptables),
        NodeConfig::new(2, Chain::Ptp, ProxyMode::Nftables),
        NodeConfig::new(3, Chain::Bandwidth, ProxyMode::Nftables),
        NodeConfig::new(4, Chain::Flannel, ProxyMode::Iptables),
    ],
    &[ISTIOD, COREDNS, Image::Ztunnel],
    |cluster| {
        cluster.deploy_control_plane(&[]);
        let ztunnel = include_str!("../cluster/manifests/ztunnel.yaml");
        cluster.server.apply(ztunnel).unwrap();
        cluster.install();
        cluster.until_whole();
    },
);

pub(crate) fn on_stock_ztunnels(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    on(&STOCK, test);
}

pub(crate) fn on_proxies(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    on(&PROXIES, test);
}

/// The same for a test in which inpod has to warn.
pub(crate) fn on_warned_proxies(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    PROXIES.use_for(test);
}

pub(crate) fn on_policy_engine(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    on(&POLICY_ENGINE, test);
}

pub(crate) fn on_every_network(test: impl FnOnce(&ExclusiveCluster<'_>)) {
    on(&NETWORKS, test);
}

fn on(cluster: &SharedCluster, test: impl FnOnce(&ExclusiveCluster<'_>)) {
    cluster.use_for(|cluster| {
        let before = cluster.warnings();
        test(cluster);
        cluster.every_node_answers();
        let mut new = cluster.warnings();
        new.retain(|warning| !before.contains(warning));
        assert_eq!(new, [""; 0], "inpod warned");
    });
}

impl ExclusiveCluster<'_> {
    /// Deploys istiod with more values, and all that it needs.
    pub(crate) fn deploy_control_plane(&self, values: &[&str]) {
        let dns = include_str!("manifests/coredns.yaml");
        self.server.apply(dns).unwrap();
        self.deploy_chart("base", "base", &[]);
        self.deploy_istiod(values);
        self.until_ready("kube-system", "app=coredns", 1).unwrap();
    }

    pub(crate) fn deploy_istiod(&self, values: &[&str]) {
        // The node gate needs istiod's controller, which removes the taint of a node with a ready agent.
        let gate = format!("taint.namespace={SYSTEM}");
        let ours = [
            "taint.enabled=true",
            &gate,
            "resources.requests.memory=128Mi",
        ];
        let values = [&ours[..], values].concat();
        self.deploy_chart("istiod", "istio-control/istio-discovery", &values);
        let wait = ["rollout", "status", "deployment/istiod", "--timeout=240s"];
        self.kubectl(&[&wait[..], &["--namespace", ISTIO]].concat())
            .unwrap();
    }

    pub(crate) fn deploy_ztunnel(&self, name: &str) {
        let values = ["logAsJson=true", &format!("resourceName={name}")];
        self.deploy_chart(name, "ztunnel", &values);
    }

    /// Installs one of Istio's charts in its ambient profile, with the images of the tests.
    pub(crate) fn deploy_chart(&self, release: &str, chart: &str, values: &[&str]) {
        let module = std::env::var_os("ISTIO_MODULE")
            .context("ISTIO_MODULE names no directory: run ./integration/test mesh")
            .unwrap();
        let path = Path::new(&module)
            .join("manifests/charts")
            .join(chart)
            .display()
            .to_string();
        let images = [
            "profile=ambient",
            "global.hub=inpod.test",
            "global.tag=1",
            "global.variant=",
            "global.imagePullPolicy=Never",
            "hub=inpod.test",
            "tag=1",
            "variant=",
            "imagePullPolicy=Never",
        ];
        let set = images.iter().chain(values);
        let set: Vec<_> = set.flat_map(|value| ["--set", value]).collect();
        let install = ["upgrade", "--install", release, &path];
        let within = ["--namespace", ISTIO, "--create-namespace"];
        self.helm(&[&install[..], &within, &set].concat()).unwrap();
    }

    /// Restarts a Deployment or a DaemonSet pod by pod, and waits for the end.
    pub(crate) fn roll(&self, namespace: &str, what: &str) {
        let of = ["--namespace", namespace, what];
        self.kubectl(&[&["rollout", "restart"][..], &of].concat())
            .unwrap();
        let wait = ["rollout", "status", "--timeout=240s"];
        self.kubectl(&[&wait[..], &of].concat()).unwrap();
        eventually("the replaced pods have ended", LONG, || {
            let pods = self.kubectl(&["get", "pods", "--namespace", namespace, "-o", ENDING])?;
            ensure!(pods.trim().is_empty(), "{pods}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Waits until the agent's last change is on this number of nodes.
    pub(crate) fn until_rolled(&self, nodes: usize) {
        let wait = ["rollout", "status", "daemonset/inpod", "--timeout=240s"];
        self.kubectl(&[&wait[..], &["--namespace", SYSTEM]].concat())
            .unwrap();
        self.until_ready(SYSTEM, AGENT, nodes).unwrap();
    }

    /// Returns inpod's Warning Events, each with the number of its occurrences.
    fn warnings(&self) -> Vec<String> {
        let list = self.server.get("/api/v1/events").unwrap();
        let all = list.pointer("/items").and_then(Value::as_array).unwrap();
        let is_ours = |event: &&Value| {
            text(event, "/type") == "Warning"
                && text(event, "/reportingComponent").starts_with("inpod.io/")
        };
        let told = all.iter().filter(is_ours).map(|event| {
            let of = |pointer| text(event, pointer);
            format!(
                "{} of {}/{}: {} ({})",
                of("/reason"),
                of("/involvedObject/namespace"),
                of("/involvedObject/name"),
                of("/message"),
                event.pointer("/series/count").unwrap_or(&Value::Null)
            )
        });
        told.collect()
    }

    /// Expects that `kubectl inpod` reaches every node, and that no pod needs attention.
    fn every_node_answers(&self) {
        eventually("kubectl inpod has an answer of every node", LONG, || {
            let output = self.kubectl_inpod(&["pods", "--unhealthy"]);
            let printed = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success(), "{output:?}");
            ensure!(printed.lines().count() <= 1, "{printed}");
            let output = self.kubectl_inpod(&["status"]);
            let printed = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success(), "{output:?}");
            for machine in self.machines() {
                let name = machine.node.name();
                ensure!(printed.contains(&name), "{name}: {printed}");
            }
            anyhow::Ok(())
        })
        .unwrap();
    }
}
