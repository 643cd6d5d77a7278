//! Runs inpod as its chart deploys it: with the settings, capabilities and cgroups of the chart, and the pods of a real
//! API server.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    ApiServer, Call, Cgroups, Inhabitant, Node, Outcome, Pod, Running, Spec, ZTUNNEL_CAPABILITIES,
    cgroups::host_cgroups,
    chart::{self, Container},
};

/// The container of the DaemonSet that does nothing for a single pod.
const INSTALLER: &str = "installer";

const ISTIO_SYSTEM: &str = "istio-system";

/// The number of plugins, or processes of pods, that start at once.
const AT_ONCE: usize = 4;

/// A pod's choice whether to join the mesh, made by its label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mesh {
    Inside,
    Outside,
}

/// A node whose agent runs as the chart's pod does, beside a ztunnel pod.
#[derive(Debug)]
pub struct DeployedNode {
    pub node: Node,
    pub server: Arc<ApiServer>,
    /// The namespace in which new pods are created.
    pub namespace: String,
    /// The containers of the agent's pod.
    pub containers: Vec<Container>,
    programs: PathBuf,
    /// The UID of the agent's pod, which names the cgroup.
    uid: String,
    next: Cell<usize>,
    /// The cgroups, which must be dropped after the processes.
    pub cgroups: Cgroups,
}

impl DeployedNode {
    /// Prepares a node on which nothing runs yet. `programs` is the directory of the agent's programs.
    pub fn new(
        server: &Arc<ApiServer>,
        node: Node,
        programs: &Path,
        manifest: &str,
    ) -> anyhow::Result<Self> {
        let mut containers = chart::containers(manifest)?;
        containers.retain(|container| container.name != INSTALLER);
        let identity = format!(
            "/api/v1/namespaces/inpod-system/pods/pod-events-{}",
            node.name()
        );
        let namespace = format!("shop-of-{}", node.name());
        let mut deployed = Self {
            uid: uid(&server.get(&identity)?)?,
            cgroups: Cgroups::new().context("the agents get cgroups: run this as root")?,
            programs: programs.to_owned(),
            server: Arc::clone(server),
            namespace: String::new(),
            next: Cell::new(0),
            containers,
            node,
        };
        for name in [ISTIO_SYSTEM, &namespace] {
            deployed.use_namespace(name)?;
        }
        Ok(deployed)
    }

    /// Creates new pods in this namespace from now on.
    pub fn use_namespace(&mut self, name: &str) -> anyhow::Result<()> {
        name.clone_into(&mut self.namespace);
        let metadata = json!({"name": name, "labels": {"kubernetes.io/metadata.name": name}});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        // Another node of the same server may have created the namespace.
        let get = || self.server.get(&self.namespace_path());
        let create = || self.server.create("/api/v1/namespaces", &object);
        let known = get().or_else(|_| create()).or_else(|_| get());
        known.map(drop)
    }

    pub fn namespace_path(&self) -> String {
        format!("/api/v1/namespaces/{}", self.namespace)
    }

    fn pods_path(&self) -> String {
        format!("{}/pods", self.namespace_path())
    }

    pub fn pod_path(&self, name: &str) -> String {
        format!("{}/{name}", self.pods_path())
    }

    /// Starts the reference ztunnel in the cgroup of a ztunnel pod.
    pub fn start_ztunnel(&self) -> anyhow::Result<()> {
        let name = format!("ztunnel-of-{}", self.node.name());
        let pods = format!("/api/v1/namespaces/{ISTIO_SYSTEM}/pods");
        let known = self.server.get(&format!("{pods}/{name}"));
        let known = known.or_else(|_| {
            let object = object(&name, self.node.name(), "ztunnel");
            self.server.create(&pods, &object)
        })?;
        let within = self
            .cgroups
            .container(&uid(&known)?, "", ZTUNNEL_CAPABILITIES)?;
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        self.node.start_ztunnel_within(&within, "ztunnel", &[])
    }

    pub fn start_services(&self) -> anyhow::Result<()> {
        self.containers
            .iter()
            .try_for_each(|container| self.start_container(container))
    }

    pub fn start_service(&self, name: &str) -> anyhow::Result<()> {
        let mut containers = self.containers.iter();
        let container = containers.find(|container| container.name == name);
        self.start_container(container.with_context(|| format!("the chart has no {name}"))?)
    }

    fn start_container(&self, container: &Container) -> anyhow::Result<()> {
        let within = self.within(&container.name, &container.capabilities)?;
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        let environment = self.environment(container);
        let environment = environment.iter();
        let environment: Vec<_> = environment
            .map(|(variable, value)| (variable.as_str(), value.as_path()))
            .collect();
        let (name, program) = (&container.name, self.programs.join(&container.name));
        self.node
            .start_program(&within, name, &program, &[], &environment)
    }

    pub fn stop_services(&self) -> anyhow::Result<()> {
        let names = || self.containers.iter().map(|container| &container.name);
        names().try_for_each(|name| self.node.signal(name, Signal::SIGTERM))?;
        names().try_for_each(|name| self.node.until_ended(name).map(drop))
    }

    /// Returns a command line that executes the program after it in a container of the agent's pod.
    pub fn within(&self, container: &str, capabilities: &str) -> anyhow::Result<Vec<String>> {
        self.cgroups.container(&self.uid, container, capabilities)
    }

    /// Returns the cgroup of the agent's pod, or of one container in the pod.
    pub fn cgroup(&self, container: Option<&str>) -> anyhow::Result<PathBuf> {
        container.map_or_else(
            || self.cgroups.pod(&self.uid),
            |container| self.cgroups.path(&self.uid, container),
        )
    }

    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// Returns the settings of the chart, with the paths, the name and the cgroup of this node.
    pub fn environment(&self, container: &Container) -> Vec<(String, PathBuf)> {
        let node = &self.node;
        let shipped = container.environment.iter();
        let shipped = shipped.map(|(variable, value)| (variable.clone(), value.into()));
        // An earlier revision under measurement knows no such setting.
        let cgroups = Some(host_cgroups()).filter(|all| !all.is_empty());
        let cgroups = cgroups.map(|all| ("INPOD_HOST_CGROUPS", all.into()));
        let own = [("INPOD_RUN_DIR", node.run_dir())].into_iter();
        let own = own.chain(cgroups);
        let elsewhere = match container.name.as_str() {
            "pod-events" => vec![
                ("INPOD_NODE_NAME", node.name().into()),
                ("INPOD_KUBECONFIG", node.kubeconfig()),
                ("INPOD_PLUGIN_STATE_DIR", node.state_dir()),
            ],
            "ztunnel-broker" => vec![("INPOD_ZDS_SOCKET", node.zds_socket())],
            _ => Vec::new(),
        };
        let own = own
            .chain(elsewhere)
            .map(|(variable, value)| (variable.to_owned(), value));
        shipped.chain(own).collect()
    }

    /// Returns the ends of the services' logs.
    pub fn logs(&self) -> String {
        let names = self.containers.iter().map(|container| &container.name);
        let logs = names.map(|name| format!("--- {name}\n{}\n", self.node.tail(name, 15)));
        logs.collect()
    }

    /// Creates pods at the API server, and their sandboxes.
    pub fn sandboxes(&self, meshes: &[Mesh]) -> anyhow::Result<Vec<Pod>> {
        let pods = meshes.iter().map(|mesh| (None, *mesh));
        self.named_sandboxes(&pods.collect::<Vec<_>>())
    }

    /// Creates pods like [`Self::sandboxes`], of which some have a given name.
    pub fn named_sandboxes(&self, pods: &[(Option<&str>, Mesh)]) -> anyhow::Result<Vec<Pod>> {
        let mut objects = Vec::new();
        let mut specs = Vec::new();
        for (name, mesh) in pods {
            let number = self.next.replace(self.next.get() + 1);
            let app = format!("web-{number}");
            let name = name.unwrap_or(&app);
            let mut object = object(name, self.node.name(), &app);
            if let (Mesh::Inside, Some(labels)) = (mesh, object.pointer_mut("/metadata/labels")) {
                *labels = json!({"app": app, "istio.io/dataplane-mode": "ambient"});
            }
            objects.push((self.pods_path(), object));
            let namespace = self.namespace.clone();
            let spec = Spec {
                namespace,
                ..Spec::new(name)
            };
            specs.push(spec.label("app", &app));
        }
        self.server.create_all(&objects)?;
        let listed = self.server.get(&self.selected(&specs))?;
        let listed = listed.get("items").and_then(Value::as_array);
        for spec in &mut specs {
            let name = Some(&spec.name[..]);
            let is_it =
                |object: &&Value| object.pointer("/metadata/name").and_then(Value::as_str) == name;
            let found = listed.into_iter().flatten().find(is_it);
            spec.uid = uid(found.context("a pod was not created")?)?;
        }
        self.node.sandboxes(specs)
    }

    /// Waits until pod-events has seen the pods.
    pub fn until_known(&self, pods: &[Pod]) -> anyhow::Result<()> {
        let mut pods = pods.iter();
        pods.try_for_each(|pod| self.node.until_known(&pod.spec))
    }

    /// Returns the API path that selects the objects of these pods.
    fn selected<'a>(&self, specs: impl IntoIterator<Item = &'a Spec>) -> String {
        let labels = specs.into_iter().flat_map(|spec| &spec.labels);
        let apps = labels.filter(|(name, _)| *name == "app");
        let apps: Vec<_> = apps.map(|(_, app)| app.as_str()).collect();
        format!(
            "{}?labelSelector=app%20in%20%28{}%29",
            self.pods_path(),
            apps.join("%2C")
        )
    }

    /// Prepares a call of the plugin in the node's network, as the runtime makes the call.
    pub fn call(
        &self,
        verb: fn(&Pod, &Path, &Path) -> Call,
        pod: &Pod,
    ) -> anyhow::Result<PluginCall<'_>> {
        Ok(self.plugin_call(self.program("inpod-cni"), self.node.call(verb, pod)))
    }

    /// Prepares a call of the given plugin, for example of another release.
    pub fn plugin_call(&self, plugin: PathBuf, call: Call) -> PluginCall<'_> {
        PluginCall {
            deployed: self,
            plugin,
            call,
        }
    }

    pub fn add(&self, pod: &Pod) -> anyhow::Result<Outcome> {
        self.call(Call::add, pod)?.succeed()
    }

    /// Has the API server mark pods as terminating. The kubelet waits for the mark before it ends the containers.
    pub fn terminate(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            let options = json!({"gracePeriodSeconds": 30});
            self.server
                .delete_with(&self.pod_path(&pod.spec.name), &options)?;
        }
        Ok(())
    }

    /// Deletes the objects of pods.
    pub fn delete(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        let specs = pods.iter().map(|pod| &pod.spec);
        self.server.delete(&self.selected(specs))
    }

    /// Starts a process in the cgroup of each pod, and writes the addresses to the pods' objects, as a kubelet does.
    pub fn inhabitants(&self, pods: &[Pod]) -> anyhow::Result<Vec<Inhabitant>> {
        let start = |pods: &[Pod]| pods.iter().map(Inhabitant::of).collect::<Vec<_>>();
        let inhabitants = thread::scope(|scope| {
            let shares = pods.chunks(pods.len().div_ceil(AT_ONCE).max(1));
            let shares: Vec<_> = shares
                .map(|share| scope.spawn(move || start(share)))
                .collect();
            let started = shares.into_iter().filter_map(|share| share.join().ok());
            started.flatten().collect::<anyhow::Result<Vec<_>>>()
        })?;
        ensure!(inhabitants.len() == pods.len(), "a thread has panicked");
        let mut changes = Vec::new();
        for (pod, inhabitant) in pods.iter().zip(&inhabitants) {
            self.cgroups.put(pod, inhabitant.pid())?;
            let ips = pod.addresses().map(|ip| json!({"ip": ip.to_string()}));
            let status = json!({"phase": "Running", "podIP": pod.v4.to_string(), "podIPs": ips});
            let path = format!("{}/status", self.pod_path(&pod.spec.name));
            changes.push((path, json!({"status": status})));
        }
        self.server.patch_all(&changes)?;
        Ok(inhabitants)
    }
}

/// A prepared call of a plugin, which can be repeated.
#[derive(Debug)]
pub struct PluginCall<'a> {
    deployed: &'a DeployedNode,
    plugin: PathBuf,
    call: Call,
}

impl PluginCall<'_> {
    pub fn start(&self) -> anyhow::Result<Running> {
        let netns = self.deployed.node.netns();
        netns.within(|| self.call.start_by(&self.plugin))?
    }

    pub fn run(&self) -> anyhow::Result<Outcome> {
        self.start()?.wait()
    }

    pub fn succeed(&self) -> anyhow::Result<Outcome> {
        self.succeeded(self.run()?)
    }

    fn succeeded(&self, outcome: Outcome) -> anyhow::Result<Outcome> {
        ensure!(outcome.code == 0, "{outcome:?}\n{}", self.deployed.logs());
        Ok(outcome)
    }

    /// Runs all calls, `AT_ONCE` of them at the same time.
    pub fn all_succeed(calls: &[Self]) -> anyhow::Result<()> {
        for calls in calls.chunks(AT_ONCE) {
            let running = calls.iter().map(Self::start);
            let running = running.collect::<Result<Vec<_>, _>>()?;
            for (call, plugin) in calls.iter().zip(running) {
                call.succeeded(plugin.wait()?)?;
            }
        }
        Ok(())
    }
}

fn uid(object: &Value) -> anyhow::Result<String> {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
    Ok(uid.context("an object has a UID")?.to_owned())
}

/// The port at which a kubelet would probe the pods.
const PROBED_PORT: u16 = 8080;

fn object(name: &str, node: &str, app: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {
            "nodeName": node,
            "serviceAccountName": name,
            "containers": [{
                "name": "app",
                "image": "app",
                "readinessProbe": {"tcpSocket": {"port": PROBED_PORT}},
            }],
        },
    })
}
