//! A Kubernetes cluster: the API server, the controllers and the scheduler share a network, and each node is a
//! [`Machine`] with containerd, a kubelet and kube-proxy, which has its own.

mod files;
mod image;
mod logs;
mod machine;
mod node;
mod traffic;

use std::{
    path::{Path, PathBuf},
    process::Child,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use serde_json::{Value, json};

pub use image::{Image, PREVIOUS_VERSION, VERSION, pack_image, previous};
pub use machine::Machine;
pub use node::{Chain, NodeConfig, ProxyMode};
pub use traffic::{Report, Traffic, ask, get};

use crate::{
    ApiServer,
    apiserver::process::{enter, spawn, tool},
    bin, eventually,
    process::succeeded,
};

pub const NODE: &str = "node-1";

/// The node of a cluster that has only one.
pub const ONLY: NodeConfig = NodeConfig::new(1, Chain::Bridge, ProxyMode::Nftables);

/// The time for several components in sequence. A kubelet retries a refused sandbox after about 12 s; the third restart
/// of a container waits up to 40 s.
pub const LONG: Duration = Duration::from_secs(120);

/// The server's flags, like those of usual clusters: pods run as existing service accounts and may request root's
/// rights. The server calls the pods of a Service itself, because no kube-proxy runs beside the server.
const SETTINGS: &[&str] = &[
    "--allow-privileged=true",
    "--kubelet-preferred-address-types=InternalIP",
    "--enable-aggregator-routing=true",
    "--api-audiences=https://kubernetes.default.svc,kubernetes.default.svc",
];

/// A running cluster; all its processes end on drop.
#[derive(Debug)]
pub struct Cluster {
    machines: Vec<Machine>,
    /// A network outside the cluster, with a route to the cluster's pods.
    pub outside: Netns,
    controllers: Mutex<Vec<Child>>,
    pub server: Arc<ApiServer>,
}

impl Cluster {
    /// Starts a cluster, whose nodes are ready and have these images.
    pub fn start(nodes: &[NodeConfig], images: &[Image]) -> anyhow::Result<Self> {
        // A missing program is named before anything starts.
        for name in [
            "KUBE_CONTROLLER_MANAGER",
            "KUBE_SCHEDULER",
            "KUBELET",
            "KUBE_PROXY",
        ] {
            tool(name)?;
        }
        let server = Arc::new(ApiServer::start_with(SETTINGS)?);
        let make = |node: &NodeConfig| Machine::new(Arc::clone(&server), *node);
        let machines = nodes.iter().map(make).collect::<Result<Vec<_>, _>>()?;
        provide(&server, &machines, images)?;
        route_to_pods(server.netns(), nodes)?;
        let cluster = Self {
            outside: outside(&server, nodes)?,
            machines,
            controllers: Mutex::default(),
            server,
        };
        cluster.control(
            "KUBE_CONTROLLER_MANAGER",
            &controller_manager(&cluster.server),
        )?;
        cluster.control("KUBE_SCHEDULER", &[])?;
        cluster.machines.iter().try_for_each(Machine::switch_on)?;
        cluster.machines.iter().try_for_each(Machine::until_ready)?;
        Ok(cluster)
    }

    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Starts a component in the network of the API server.
    fn control(&self, variable: &str, flags: &[String]) -> anyhow::Result<()> {
        let (server, name) = (&self.server, variable.to_lowercase());
        let kubeconfig = server.file("admin.kubeconfig");
        let authority = server.authority().display().to_string();
        std::fs::write(&kubeconfig, ApiServer::kubeconfig_of("admin", &authority))?;
        let mut command = enter(server.netns(), &tool(variable)?);
        command
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .args(["--leader-elect=false", "--bind-address=127.0.0.1"])
            .args(flags);
        let child = spawn(command, &server.file(&format!("{name}.log")))?;
        let mut running = self.controllers.lock();
        running
            .as_mut()
            .unwrap_or_else(|poisoned| poisoned.get_mut())
            .push(child);
        Ok(())
    }

    /// Returns the selected pods, without terminating pods.
    pub fn pods(&self, namespace: &str, label: &str) -> anyhow::Result<Vec<Value>> {
        let label = label.replace('=', "%3D").replace('/', "%2F");
        let path = format!("/api/v1/namespaces/{namespace}/pods?labelSelector={label}");
        let list = self.server.get(&path)?;
        let items = list.pointer("/items").and_then(Value::as_array);
        let stays = |pod: &&Value| pod.pointer("/metadata/deletionTimestamp").is_none();
        Ok(items
            .context("no list")?
            .iter()
            .filter(stays)
            .cloned()
            .collect())
    }

    /// Waits until `count` pods are selected and ready.
    pub fn until_ready(
        &self,
        namespace: &str,
        label: &str,
        count: usize,
    ) -> anyhow::Result<Vec<Value>> {
        let what = format!("{count} of {namespace}/{label} are ready");
        eventually(&what, LONG, || {
            let pods = self.pods(namespace, label)?;
            let all = pods.len() == count && pods.iter().all(|pod| is(pod, "Ready"));
            ensure!(all, "{}", pods.iter().map(summary).collect::<String>());
            anyhow::Ok(pods)
        })
    }

    pub fn pod(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        self.server
            .get(&format!("/api/v1/namespaces/{namespace}/pods/{name}"))
    }

    pub fn make_namespace(&self, name: &str, labels: &Value) -> anyhow::Result<()> {
        let metadata = json!({"name": name, "labels": labels});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        self.server.create("/api/v1/namespaces", &object).map(drop)
    }

    /// Makes the pods of a namespace join the mesh, or leave the mesh.
    pub fn label_namespace(&self, name: &str, mode: Option<&str>) -> anyhow::Result<()> {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
        let path = format!("/api/v1/namespaces/{name}");
        self.server.patch(&path, &change).map(drop)
    }

    /// Runs `inpod` as a user with every right at the API server, outside any node.
    pub fn person(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = enter(self.server.netns(), &bin("inpod")?);
        command.args(arguments).arg("--kubeconfig");
        succeeded("inpod", &command.arg(self.kubeconfig()).output()?)
    }

    /// Runs helm as the same user.
    pub fn helm(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = enter(self.server.netns(), &tool("HELM")?);
        command.args(arguments).env("KUBECONFIG", self.kubeconfig());
        succeeded("helm", &command.env("HOME", self.server.file("")).output()?)
    }

    /// Runs kubectl as the same user.
    pub fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = enter(self.server.netns(), &tool("KUBECTL")?);
        command.args(arguments).env("KUBECONFIG", self.kubeconfig());
        succeeded(
            "kubectl",
            &command.env("HOME", self.server.file("")).output()?,
        )
    }

    /// Returns the configuration of a user with every right.
    pub fn kubeconfig(&self) -> PathBuf {
        self.server.file("admin.kubeconfig")
    }

    /// Returns the end of every log and the Events, which explain a failure.
    pub fn diagnostics(&self) -> String {
        logs::diagnostics(self)
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.server.file(name)).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let mut all = self
            .controllers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for child in all.iter_mut() {
            // The kill fails if the process has ended already.
            child.kill().unwrap_or_default();
            child.wait().map(drop).unwrap_or_default();
        }
        let name = self.outside.path().file_name().unwrap_or_default();
        crate::run("ip", &["netns".as_ref(), "del".as_ref(), name])
            .map(drop)
            .unwrap_or_default();
    }
}

fn controller_manager(server: &ApiServer) -> Vec<String> {
    let file = |path: &Path| path.display().to_string();
    vec![
        format!(
            "--service-account-private-key-file={}",
            file(&server.file("sa.key"))
        ),
        format!("--root-ca-file={}", file(&server.authority())),
        // The controller then notices the restart of a node soon.
        "--node-monitor-period=1s".to_owned(),
        "--node-monitor-grace-period=20s".to_owned(),
    ]
}

fn outside(server: &ApiServer, nodes: &[NodeConfig]) -> anyhow::Result<Netns> {
    let name = format!(
        "out-{}",
        server.file("").display().to_string().replace('/', "")
    );
    let netns = crate::pod::make_netns(&name)?;
    server.plug_at(&netns, 99)?;
    route_to_pods(&netns, nodes)?;
    Ok(netns)
}

/// Adds routes to the pods by way of their nodes, which know how to reach the pods.
fn route_to_pods(netns: &Netns, nodes: &[NodeConfig]) -> anyhow::Result<()> {
    nodes
        .iter()
        .try_for_each(|node| node.route_from(netns.path()))
}

/// Packs the images once, for all machines.
fn provide(server: &ApiServer, machines: &[Machine], images: &[Image]) -> anyhow::Result<()> {
    let dir = server.file("images");
    std::fs::create_dir_all(&dir)?;
    for image in images {
        let archive = image.write(&dir)?;
        machines
            .iter()
            .try_for_each(|machine| machine.provide(&archive))?;
    }
    Ok(std::fs::remove_dir_all(dir)?)
}

pub fn is(object: &Value, condition: &str) -> bool {
    let all = object
        .pointer("/status/conditions")
        .and_then(Value::as_array);
    let found = all
        .into_iter()
        .flatten()
        .find(|found| found.get("type").and_then(Value::as_str) == Some(condition));
    found.and_then(|found| found.get("status")) == Some(&json!("True"))
}

pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Formats a pod in one line: the phase of the pod and the last states of its containers.
fn summary(pod: &Value) -> String {
    let of = |pointer| pod.pointer(pointer).and_then(Value::as_array);
    let kinds = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let containers = kinds.into_iter().filter_map(of).flatten();
    let each = containers.map(|container| {
        let (state, last) = (container.get("state"), container.get("lastState"));
        let of = |state: Option<&Value>| state.map(Value::to_string).unwrap_or_default();
        format!(
            "\n  {} ready={} {} before: {}",
            text(container, "/name"),
            container.get("ready").unwrap_or(&Value::Null),
            of(state),
            of(last)
        )
    });
    format!(
        "\n{} {} {}{}",
        text(pod, "/metadata/name"),
        text(pod, "/status/phase"),
        text(pod, "/status/podIP"),
        each.collect::<String>()
    )
}
