//! An agent under comparison: the programs of one tree, run on a node of their own as the agent's chart runs them.

use std::{
    cell::RefCell,
    fs,
    ops::Deref,
    os::fd::AsRawFd as _,
    path::Path,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{
    ApiServer, Call, DeployedNode, Inhabitant, IstioCni, Mesh, Node, PluginCall, Pod, TIMEOUT,
    Verbs, chart::Container, eventually, number,
};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use serde_json::{Value, json};

/// The name of the manifest that `integration/bench/run` puts beside the programs of a tree.
const MANIFEST: &str = "manifest.yaml";

/// The CNI chain before Istio's agent appends its plugin.
const PRIMARY: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#;

/// The longest time that a restart may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(180);

/// The number of pods that are created at once.
const BATCH: usize = 250;

/// The metrics of netconfig that count the work of a call.
const COUNTS: [&str; 4] = [
    "netlink_requests",
    "netns_visits",
    "process_walks",
    "conntrack_dumps",
];

/// An agent counts as idle after this time with less than `BUSY` of work per interval: checking the listeners of one
/// pod takes less, verifying pods takes more.
const IDLE: Duration = Duration::from_millis(150);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const BUSY: Duration = Duration::from_millis(3);

pub(crate) struct Side {
    pub(crate) name: String,
    /// The agent, if it is Istio's.
    istio: Option<RefCell<IstioCni>>,
    pods: Vec<(Pod, Inhabitant)>,
    deployed: DeployedNode,
}

impl Side {
    /// Starts the agent and a ztunnel.
    pub(crate) fn start(
        server: &Arc<ApiServer>,
        name: &str,
        programs: &Path,
    ) -> anyhow::Result<Self> {
        let node = Node::of_cluster(server)?;
        let (istio, manifest) = if programs.join("install-cni").is_file() {
            let (agent, manifest) = istio_cni(server, &node, programs)?;
            (Some(RefCell::new(agent)), manifest.to_owned())
        } else {
            let manifest = fs::read_to_string(programs.join(MANIFEST));
            (
                None,
                manifest.with_context(|| format!("no {MANIFEST} of {name}"))?,
            )
        };
        let side = Self {
            name: name.to_owned(),
            istio,
            pods: Vec::new(),
            deployed: DeployedNode::new(server, node, programs, &manifest)?,
        };
        side.deployed.start_ztunnel()?;
        side.start_agent()?;
        if side.istio.is_none() {
            side.node.ready().with_context(|| side.logs())?;
        }
        Ok(side)
    }

    fn start_agent(&self) -> anyhow::Result<()> {
        let Some(agent) = &self.istio else {
            return self.start_services();
        };
        let within = self.within("install-cni", "+all")?;
        let within: Vec<_> = within.iter().map(String::as_str).collect();
        agent.borrow_mut().start(&within, "info")
    }

    /// Returns the ends of the agent's logs.
    fn logs(&self) -> String {
        self.istio
            .as_ref()
            .map_or_else(|| self.deployed.logs(), |agent| agent.borrow().log())
    }

    pub(crate) fn stop_agent(&self) -> anyhow::Result<()> {
        if let Some(agent) = &self.istio {
            return agent.borrow_mut().delete_pod().map(drop);
        }
        self.stop_services()
    }

    /// Starts the agent again. Returns the time until the agent was ready and had ended the work of its start, or None
    /// after [`LIMIT`].
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

    /// Waits until the agent has been idle for a while, and returns since when. A request about each pod would be work
    /// for the agent, so none is sent.
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
        processor_time(&self.cgroup(None)?)
    }

    /// Returns the processor time of a service since the first start of the agent.
    pub(crate) fn processor_time_of(&self, service: &str) -> anyhow::Result<Duration> {
        processor_time(&self.cgroup(Some(service))?)
    }

    /// Returns the anonymous memory of the agent's processes in KiB.
    pub(crate) fn anonymous(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for pid in processes(&self.cgroup(None)?)? {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let mut lines = status.lines();
            let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
            let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
            sum += number.context("no RssAnon")?.parse::<u64>()?;
        }
        Ok(sum)
    }

    /// Returns the counters of netconfig since its start.
    pub(crate) fn counts(&self) -> anyhow::Result<Vec<(&'static str, f64)>> {
        let socket = inpod_service::socket(&self.node.run_dir(), "netconfig");
        let metrics = Verbs::at(&socket)?.metrics(&socket)?;
        let count = |name| number(&metrics, &format!("inpod_netconfig_{name}"));
        Ok(COUNTS.map(|name| (name, count(name))).to_vec())
    }

    pub(crate) fn pods(&self) -> usize {
        self.pods.len()
    }

    pub(crate) const fn is_istio(&self) -> bool {
        self.istio.is_some()
    }

    /// Creates pods at the API server and their sandboxes, and waits until the agent has seen the pods.
    pub(crate) fn sandboxes(&self, meshes: &[Mesh]) -> anyhow::Result<Vec<Pod>> {
        let pods = self.deployed.sandboxes(meshes)?;
        if self.istio.is_none() {
            self.until_known(&pods)?;
        }
        Ok(pods)
    }

    /// Prepares a call of the plugin in the node's network, as the runtime makes the call.
    pub(crate) fn call(
        &self,
        verb: fn(&Pod, &Path, &Path) -> Call,
        pod: &Pod,
    ) -> anyhow::Result<PluginCall<'_>> {
        let Some(agent) = &self.istio else {
            return self.deployed.call(verb, pod);
        };
        let call = agent.borrow().to_istio_call(self.node.call(verb, pod))?;
        Ok(self.plugin_call(self.program("istio-cni"), call))
    }

    /// Ends pods with both DELs of the runtime, then deletes their objects.
    pub(crate) fn end(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            self.call(Call::del, pod)?.succeed()?;
        }
        self.forget(pods)
    }

    /// Ends pods whose first DEL has already been made.
    pub(crate) fn forget(&self, pods: &[&Pod]) -> anyhow::Result<()> {
        for pod in pods {
            pod.unmount()?;
            self.call(Call::del_again, pod)?.succeed()?;
        }
        self.delete(pods)
    }

    /// Starts pods outside the mesh, with the processes for which Istio's agent searches.
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

    /// Sets the label by which the pods of the namespace join or leave the mesh.
    pub(crate) fn label(&self, mode: Option<&str>) -> anyhow::Result<()> {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
        self.server.patch(&self.namespace_path(), &change).map(drop)
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

    /// Enrolls pods, each with a process, until `count` pods are enrolled.
    pub(crate) fn fill(&mut self, count: usize) -> anyhow::Result<()> {
        while self.pods.len() < count {
            let missing = count - self.pods.len();
            let pods = self.sandboxes(&vec![Mesh::Inside; missing.min(BATCH)])?;
            let calls = pods.iter().map(|pod| self.call(Call::add, pod));
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            PluginCall::all_succeed(&calls).with_context(|| self.logs())?;
            let inhabitants = self.inhabitants(&pods)?;
            self.pods.extend(pods.into_iter().zip(inhabitants));
        }
        if self.istio.is_some() {
            return Ok(());
        }
        eventually("the pods are enrolled", TIMEOUT, || self.enrolled(count))
    }
}

impl Deref for Side {
    type Target = DeployedNode;

    fn deref(&self) -> &DeployedNode {
        &self.deployed
    }
}

pub(crate) struct RunningPod {
    pub(crate) pod: Pod,
    _inhabitant: Inhabitant,
}

impl RunningPod {
    pub(crate) fn until_rules_exist(&self, exist: bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.pod.netns.within(has_tables)?? != exist {
            let name = &self.pod.spec.name;
            ensure!(Instant::now() < deadline, "rules of {name}: {}", !exist);
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// Returns whether nf_tables of this thread's netns has tables. Asks the kernel, because starting `nft` would take longer
/// than the enrollment that is measured.
fn has_tables() -> anyhow::Result<bool> {
    const NLMSG_ERROR: u16 = 2;
    const NLMSG_DONE: u16 = 3;
    // NFT_MSG_GETTABLE (linux/netfilter/nf_tables.h) as a dump (NLM_F_REQUEST | NLM_F_DUMP), for all families.
    let (kind, flags) = (0x0a01_u16.to_ne_bytes(), 0x301_u16.to_ne_bytes());
    let request = [&20_u32.to_ne_bytes()[..], &kind, &flags, &[0; 12]].concat();
    let flags = SockFlag::SOCK_CLOEXEC;
    let protocol = SockProtocol::NetlinkNetFilter;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut response = vec![0; 1 << 16];
    recv(socket.as_raw_fd(), &mut response, MsgFlags::empty())?;
    let kind = response.get(4..).and_then(<[u8]>::first_chunk::<2>);
    let kind = u16::from_ne_bytes(*kind.context("a header")?);
    ensure!(kind != NLMSG_ERROR, "the kernel refuses the dump");
    Ok(kind != NLMSG_DONE)
}

/// A probe that the kubelet would execute in a container of the agent.
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
                .arg(self.side.program(program.trim_start_matches('/')))
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

/// Creates the directories of a node, and deploys the agent's part of its chart.
fn istio_cni(
    server: &Arc<ApiServer>,
    node: &Node,
    programs: &Path,
) -> anyhow::Result<(IstioCni, &'static str)> {
    let dir = node.run_dir().with_file_name("node");
    let network = dir.join("host/etc/cni/net.d");
    fs::create_dir_all(&network)?;
    fs::create_dir_all(dir.join("host/opt/cni/bin"))?;
    fs::write(network.join("10-podnet.conflist"), PRIMARY)?;
    let agent = IstioCni::new(server, node, programs, &dir);
    let manifest = agent.deploy(&[])?;
    Ok((agent, manifest))
}

/// Returns the processor time of a cgroup and of the cgroups below.
fn processor_time(cgroup: &Path) -> anyhow::Result<Duration> {
    let text = fs::read_to_string(cgroup.join("cpu.stat"))?;
    let mut lines = text.lines();
    let usage = lines.find_map(|line| line.strip_prefix("usage_usec "));
    Ok(Duration::from_micros(usage.context("no usage")?.parse()?))
}

/// Returns the processes in a cgroup and in the cgroups below.
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
