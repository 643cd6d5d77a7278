//! An agent under comparison: programs of one tree, run on a node of their own as its chart runs them.

use std::{
    cell::{Cell, RefCell},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{
    ApiServer, Call, Cgroups, Inhabitant, IstioCni, Node, Outcome, Pod, Running, Spec, TIMEOUT,
    Verbs, ZTUNNEL_CAPABILITIES,
    chart::{self, Container},
    eventually, number,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::netlink::{self, Rules};

/// The file that `integration/bench/run` puts beside the programs of a tree.
const MANIFEST: &str = "manifest.yaml";

/// A part of the DaemonSet that does nothing for a pod.
const INSTALLER: &str = "installer";

const ISTIO_SYSTEM: &str = "istio-system";

/// The chain before Istio's agent appends itself.
const PRIMARY: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#;

/// The most that a restart may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(180);

/// Pods that are created at once.
const BATCH: usize = 250;

/// Plugins, or processes of pods, that start at once.
const AT_ONCE: usize = 4;

/// netconfig's metrics of what a call costs.
const COUNTS: [&str; 4] = [
    "netlink_requests",
    "netns_visits",
    "process_walks",
    "conntrack_dumps",
];

/// An agent is idle after this time with less than this work per interval: a check of one pod's listeners is less,
/// verifying pods is more.
const IDLE: Duration = Duration::from_millis(150);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const BUSY: Duration = Duration::from_millis(3);

/// A pod's choice by its label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mesh {
    Inside,
    Outside,
}

pub(crate) struct Side {
    pub(crate) name: String,
    pub(crate) node: Node,
    /// Set if it is Istio's.
    istio: Option<RefCell<IstioCni>>,
    programs: PathBuf,
    containers: Vec<Container>,
    server: Arc<ApiServer>,
    namespace: String,
    /// Names the cgroup of the agent's pod.
    uid: String,
    pods: Vec<(Pod, Inhabitant)>,
    next: Cell<usize>,
    /// Dropped after the processes.
    cgroups: Cgroups,
}

impl Side {
    /// Starts the agent and a ztunnel.
    pub(crate) fn start(
        server: &Arc<ApiServer>,
        name: &str,
        programs: &Path,
    ) -> anyhow::Result<Self> {
        let node = Node::of_cluster(server)?;
        let namespace = format!("shop-of-{}", node.name());
        for name in [namespace.as_str(), ISTIO_SYSTEM] {
            let metadata = json!({"name": name, "labels": {"kubernetes.io/metadata.name": name}});
            let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
            if server.get(&format!("/api/v1/namespaces/{name}")).is_err() {
                server.create("/api/v1/namespaces", &object)?;
            }
        }
        let (istio, manifest) = if programs.join("install-cni").is_file() {
            let (agent, manifest) = istio_cni(server, &node, programs)?;
            (Some(RefCell::new(agent)), manifest)
        } else {
            let manifest = fs::read_to_string(programs.join(MANIFEST));
            (
                None,
                manifest.with_context(|| format!("no {MANIFEST} of {name}"))?,
            )
        };
        let mut containers = chart::containers(&manifest)?;
        containers.retain(|container| container.name != INSTALLER);
        let identity = format!(
            "/api/v1/namespaces/inpod-system/pods/pod-events-{}",
            node.name()
        );
        let side = Self {
            name: name.to_owned(),
            istio,
            programs: programs.to_owned(),
            containers,
            namespace,
            uid: uid(&server.get(&identity)?)?,
            pods: Vec::new(),
            next: Cell::new(0),
            cgroups: Cgroups::new().context("the agents get cgroups: run this as root")?,
            server: Arc::clone(server),
            node,
        };
        side.start_ztunnel()?;
        side.start_agent()?;
        if side.istio.is_none() {
            side.node.ready().with_context(|| side.logs())?;
        }
        Ok(side)
    }

    /// Starts the reference ztunnel in the cgroup of a ztunnel pod.
    fn start_ztunnel(&self) -> anyhow::Result<()> {
        let node = self.node.name();
        let object = object(&format!("ztunnel-of-{node}"), node, "ztunnel");
        let pods = format!("/api/v1/namespaces/{ISTIO_SYSTEM}/pods");
        let uid = uid(&self.server.create(&pods, &object)?)?;
        let within = self.cgroups.container(&uid, "", ZTUNNEL_CAPABILITIES)?;
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        self.node.start_ztunnel_within(&within, "ztunnel", &[])
    }

    fn start_agent(&self) -> anyhow::Result<()> {
        let Some(agent) = &self.istio else {
            let mut containers = self.containers.iter();
            return containers.try_for_each(|container| self.start_container(container));
        };
        let within = self.within("install-cni", "+all")?;
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        agent.borrow_mut().start(&within, "info")
    }

    /// Returns a command line that puts the program after it into a container of the agent's pod.
    fn within(&self, container: &str, capabilities: &str) -> anyhow::Result<Vec<String>> {
        self.cgroups.container(&self.uid, container, capabilities)
    }

    /// Returns the chart's settings, with the paths and the name of this node.
    fn environment(&self, container: &Container) -> Vec<(String, PathBuf)> {
        let node = &self.node;
        let shipped = container.environment.iter();
        let shipped = shipped.map(|(variable, value)| (variable.clone(), value.into()));
        let own = [("INPOD_RUN_DIR", node.run_dir())].into_iter();
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

    /// Returns how the agent's logs end.
    fn logs(&self) -> String {
        if let Some(agent) = &self.istio {
            return agent.borrow().log();
        }
        let names = self.containers.iter().map(|container| &container.name);
        let logs = names.map(|name| format!("--- {name}\n{}\n", self.node.tail(name, 15)));
        logs.collect()
    }

    pub(crate) fn stop_agent(&self) -> anyhow::Result<()> {
        if let Some(agent) = &self.istio {
            return agent.borrow_mut().delete_pod().map(drop);
        }
        let names = || self.containers.iter().map(|container| &container.name);
        names().try_for_each(|name| self.node.signal(name, Signal::SIGTERM))?;
        names().try_for_each(|name| self.node.until_ended(name).map(drop))
    }

    /// Starts the agent again; returns the time until it was ready and had ended the work of its start, or None if that
    /// is longer than [`LIMIT`].
    pub(crate) fn resume(&self) -> anyhow::Result<Option<Duration>> {
        let began = Instant::now();
        match self.resumed(began + LIMIT) {
            Ok(idle) => Ok(Some(idle.duration_since(began))),
            Err(_) if began.elapsed() >= LIMIT => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn resumed(&self, deadline: Instant) -> anyhow::Result<Instant> {
        self.start_agent()?;
        if self.istio.is_some() {
            return self.until_idle(deadline);
        }
        eventually("inpod is ready", LIMIT, || {
            ensure!(self.node.api().status()?.ready, "not ready");
            anyhow::Ok(())
        })?;
        let idle = self.until_idle(deadline)?;
        let claims = self.node.api().claims()?.len();
        ensure!(claims >= self.pods.len(), "only {claims} claims");
        self.enrolled(self.pods.len())?;
        Ok(idle)
    }

    /// Waits until the agent has been idle for a while; returns since when. A question about each pod would be work.
    fn until_idle(&self, deadline: Instant) -> anyhow::Result<Instant> {
        let mut since = Instant::now();
        while since.elapsed() < IDLE {
            let before = self.processor_time()?;
            thread::sleep(POLL_INTERVAL);
            let now = Instant::now();
            ensure!(now < deadline, "the agent works on");
            if self.processor_time()?.saturating_sub(before) > BUSY {
                since = now;
            }
        }
        Ok(since)
    }

    fn enrolled(&self, wanted: usize) -> anyhow::Result<()> {
        let pods = self.node.api().list(ListPodsRequest::default())?;
        let enrolled = pods.iter().filter(|pod| pod.state() == PodState::Enrolled);
        let enrolled = enrolled.count();
        ensure!(enrolled >= wanted, "{enrolled} of {wanted} are enrolled");
        Ok(())
    }

    /// Returns the processor time of the agent with its children.
    pub(crate) fn processor_time(&self) -> anyhow::Result<Duration> {
        processor_time(&self.cgroups.pod(&self.uid)?)
    }

    /// Returns the processor time of a service since the agent's first start.
    pub(crate) fn processor_time_of(&self, service: &str) -> anyhow::Result<Duration> {
        processor_time(&self.cgroups.path(&self.uid, service)?)
    }

    /// Returns the anonymous memory of the agent's processes in KiB.
    pub(crate) fn anonymous(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for pid in processes(&self.cgroups.pod(&self.uid)?)? {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let mut lines = status.lines();
            let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
            let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
            sum += number.context("no RssAnon")?.parse::<u64>()?;
        }
        Ok(sum)
    }

    /// Returns what netconfig has counted since its start.
    pub(crate) fn counts(&self) -> anyhow::Result<Vec<(&'static str, f64)>> {
        let socket = inpod_service::socket(&self.node.run_dir(), "netconfig");
        let metrics = Verbs::at(&socket)?.metrics(&socket)?;
        let count = |name| number(&metrics, &format!("inpod_netconfig_{name}"));
        Ok(COUNTS.map(|name| (name, count(name))).to_vec())
    }

    /// Returns the rules of an enrolled pod.
    pub(crate) fn rules(&self) -> anyhow::Result<Rules> {
        let (pod, _) = self.pods.first().context("no pod is enrolled")?;
        Rules::of(&pod.netns)
    }

    pub(crate) fn pods(&self) -> usize {
        self.pods.len()
    }

    pub(crate) const fn is_istio(&self) -> bool {
        self.istio.is_some()
    }

    fn collection(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.namespace)
    }

    /// Creates pods at the API server, and their sandboxes; returns once the agent has seen them.
    pub(crate) fn sandboxes(&self, meshes: &[Mesh]) -> anyhow::Result<Vec<Pod>> {
        let mut objects = Vec::new();
        let mut specs = Vec::new();
        for mesh in meshes {
            let number = self.next.replace(self.next.get() + 1);
            let name = format!("web-{number}");
            let mut object = object(&name, self.node.name(), &name);
            if let (Mesh::Inside, Some(labels)) = (mesh, object.pointer_mut("/metadata/labels")) {
                *labels = json!({"app": name, "istio.io/dataplane-mode": "ambient"});
            }
            objects.push((self.collection(), object));
            let namespace = self.namespace.clone();
            specs.push(Spec {
                namespace,
                ..Spec::new(&name)
            });
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
        let pods = self.node.sandboxes(specs)?;
        if self.istio.is_none() {
            pods.iter()
                .try_for_each(|pod| self.node.until_known(&pod.spec))?;
        }
        Ok(pods)
    }

    /// Returns the path of the objects of these pods.
    fn selected<'a>(&self, specs: impl IntoIterator<Item = &'a Spec>) -> String {
        let names = specs.into_iter().map(|spec| spec.name.as_str());
        let names = names.collect::<Vec<_>>().join("%2C");
        format!(
            "{}?labelSelector=app%20in%20%28{names}%29",
            self.collection()
        )
    }

    /// Prepares a call of the plugin as the runtime makes it, in the node's network.
    pub(crate) fn call(
        &self,
        verb: fn(&Pod, &Path, &Path) -> Call,
        pod: &Pod,
    ) -> anyhow::Result<PluginCall<'_>> {
        let call = self.node.call(verb, pod);
        let (plugin, call) = match &self.istio {
            None => ("inpod-cni", call),
            Some(agent) => ("istio-cni", agent.borrow().call(call)?),
        };
        Ok(PluginCall {
            side: self,
            plugin: self.programs.join(plugin),
            call,
        })
    }

    /// Has the API server mark pods as terminating, which the kubelet waits for before it ends their containers.
    pub(crate) fn terminate(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            let path = format!("{}/{}", self.collection(), pod.spec.name);
            let options = json!({"gracePeriodSeconds": 30});
            self.server.delete_with(&path, &options)?;
        }
        Ok(())
    }

    /// Ends pods: both DELs of the runtime, then their objects.
    pub(crate) fn end(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            self.call(Call::del, pod)?.succeed()?;
        }
        self.forget(pods)
    }

    /// Ends pods after their first DEL.
    pub(crate) fn forget(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            pod.unmount()?;
            self.call(Call::del_again, pod)?.succeed()?;
        }
        let specs = pods.iter().map(|pod| &pod.spec);
        self.server.delete(&self.selected(specs))
    }

    /// Starts pods outside the mesh, with processes as Istio's agent searches for them.
    pub(crate) fn running_outside(&self, count: usize) -> anyhow::Result<Vec<RunningPod>> {
        let pods = self.sandboxes(&vec![Mesh::Outside; count])?;
        for pod in &pods {
            self.call(Call::add, pod)?.succeed()?;
        }
        let inhabitants = self.inhabitants(&pods)?;
        let pods = pods.into_iter().zip(inhabitants);
        let running = pods.map(|(pod, inhabitant)| RunningPod {
            pod,
            _inhabitant: inhabitant,
        });
        Ok(running.collect())
    }

    /// Gives pods a process in their cgroups, and their objects the addresses, as a kubelet does.
    fn inhabitants(&self, pods: &[Pod]) -> anyhow::Result<Vec<Inhabitant>> {
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
            let path = format!("{}/{}/status", self.collection(), pod.spec.name);
            changes.push((path, json!({"status": status})));
        }
        self.server.patch_all(&changes)?;
        Ok(inhabitants)
    }

    /// Sets whether the namespace's pods join.
    pub(crate) fn label(&self, mode: Option<&str>) -> anyhow::Result<()> {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
        let path = format!("/api/v1/namespaces/{}", self.namespace);
        self.server.patch(&path, &change).map(drop)
    }

    /// Returns the probes that a kubelet executes in this time.
    pub(crate) fn probes(&self, time: Duration) -> Vec<Probe<'_>> {
        let mut due = Vec::new();
        for container in &self.containers {
            for probe in &container.probes {
                let period = probe.get("periodSeconds").and_then(Value::as_u64);
                let times = time.as_secs() / period.unwrap_or(10).max(1);
                due.extend((0..times.max(1)).map(|_| Probe {
                    side: self,
                    container,
                    probe,
                }));
            }
        }
        due
    }

    /// Enrolls pods, each with a process, until there are as many.
    pub(crate) fn fill(&mut self, count: usize) -> anyhow::Result<()> {
        while self.pods.len() < count {
            let missing = count - self.pods.len();
            let pods = self.sandboxes(&vec![Mesh::Inside; missing.min(BATCH)])?;
            let calls = pods.iter().map(|pod| self.call(Call::add, pod));
            for calls in calls.collect::<Result<Vec<_>, _>>()?.chunks(AT_ONCE) {
                let running = calls.iter().map(PluginCall::start);
                for plugin in running.collect::<Result<Vec<_>, _>>()? {
                    let outcome = plugin.wait()?;
                    ensure!(outcome.code == 0, "{outcome:?}\n{}", self.logs());
                }
            }
            let inhabitants = self.inhabitants(&pods)?;
            self.pods.extend(pods.into_iter().zip(inhabitants));
        }
        if self.istio.is_some() {
            return Ok(());
        }
        eventually("the pods are enrolled", TIMEOUT, || self.enrolled(count))
    }
}

pub(crate) struct RunningPod {
    pub(crate) pod: Pod,
    _inhabitant: Inhabitant,
}

impl RunningPod {
    pub(crate) fn until_it_has_rules(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !self.pod.netns.within(netlink::has_tables)?? {
            ensure!(Instant::now() < deadline, "{} has none", self.pod.spec.name);
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// A probe of the kubelet.
pub(crate) struct Probe<'a> {
    side: &'a Side,
    container: &'a Container,
    probe: &'a Value,
}

impl Probe<'_> {
    pub(crate) fn execute(&self) -> anyhow::Result<()> {
        let node = &self.side.node;
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", node.netns().path().display()));
        let text = |pointer| self.probe.pointer(pointer).and_then(Value::as_str);
        if let Some(port) = self.probe.pointer("/httpGet/port") {
            let (host, path) = (text("/httpGet/host"), text("/httpGet/path"));
            let (host, path) = (host.unwrap_or("127.0.0.1"), path.unwrap_or("/"));
            command.args(["curl", "-sf", "-o", "/dev/null"]);
            command.arg(format!("http://{host}:{port}{path}"));
        } else {
            let words = self
                .probe
                .pointer("/exec/command")
                .and_then(Value::as_array);
            let words = words.context("only exec and httpGet are known")?.iter();
            let mut words = words.filter_map(Value::as_str);
            let program = words.next().context("a probe has a program")?;
            let within = self
                .side
                .within(&self.container.name, &self.container.capabilities)?;
            command
                .args(within)
                .arg(self.side.programs.join(program.trim_start_matches('/')))
                .args(words)
                .env_clear()
                .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
                .envs(self.side.environment(self.container));
        }
        let output = command.output()?;
        ensure!(
            output.status.success(),
            "{}: {output:?}",
            self.container.name
        );
        Ok(())
    }
}

pub(crate) struct PluginCall<'a> {
    side: &'a Side,
    plugin: PathBuf,
    call: Call,
}

impl PluginCall<'_> {
    pub(crate) fn start(&self) -> anyhow::Result<Running> {
        let netns = self.side.node.netns();
        netns.within(|| self.call.start_by(&self.plugin))?
    }

    pub(crate) fn succeed(&self) -> anyhow::Result<Outcome> {
        let outcome = self.start()?.wait()?;
        ensure!(outcome.code == 0, "{outcome:?}\n{}", self.side.logs());
        Ok(outcome)
    }
}

/// Creates the directories of a node and the agent's part of its chart.
fn istio_cni(
    server: &Arc<ApiServer>,
    node: &Node,
    programs: &Path,
) -> anyhow::Result<(IstioCni, String)> {
    let dir = node.run_dir().with_file_name("node");
    let network = dir.join("host/etc/cni/net.d");
    fs::create_dir_all(&network)?;
    fs::create_dir_all(dir.join("host/opt/cni/bin"))?;
    fs::write(network.join("10-podnet.conflist"), PRIMARY)?;
    let agent = IstioCni::new(server, node, programs, &dir);
    let manifest = agent.deploy(&[])?;
    Ok((agent, manifest))
}

/// Returns the processor time of a cgroup and those below.
fn processor_time(cgroup: &Path) -> anyhow::Result<Duration> {
    let text = fs::read_to_string(cgroup.join("cpu.stat"))?;
    let mut lines = text.lines();
    let usage = lines.find_map(|line| line.strip_prefix("usage_usec "));
    Ok(Duration::from_micros(usage.context("no usage")?.parse()?))
}

/// Returns the processes in a cgroup and below.
fn processes(cgroup: &Path) -> anyhow::Result<Vec<String>> {
    let own = fs::read_to_string(cgroup.join("cgroup.procs"))?;
    let mut found: Vec<_> = own.lines().map(str::to_owned).collect();
    for entry in fs::read_dir(cgroup)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(processes(&path)?);
        }
    }
    Ok(found)
}

fn uid(object: &Value) -> anyhow::Result<String> {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
    Ok(uid.context("an object has a UID")?.to_owned())
}

fn object(name: &str, node: &str, app: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {
            "nodeName": node,
            "serviceAccountName": format!("sa-{name}"),
            "containers": [{"name": "app", "image": "app"}],
        },
    })
}
