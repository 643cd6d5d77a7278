use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::{ExplainPodResponse, PodState};
use netns::Netns;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    Access, Api, Call, Outcome, PATIENCE, Pod, Spec, bin, eventually, guard,
    pod::{exec_in, make_netns},
    run,
};

/// The services of a node, in no order that matters.
pub const SERVICES: [&str; 3] = ["netconfig", "ztunnel-broker", "pod-events"];

/// Nodes and sandboxes are numbered through one process, so that tests can run side by side.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// A node: a network namespace with a bridge, a directory, and the processes that run there.
#[derive(Debug)]
pub struct Node {
    name: String,
    dir: PathBuf,
    netns: Netns,
    api: Api,
    processes: RefCell<BTreeMap<String, Child>>,
    next_address: Cell<u16>,
    keep: Cell<bool>,
}

impl Node {
    /// A node with its bridge and without processes.
    ///
    /// # Errors
    ///
    /// Outside of the isolation, or when a command fails.
    pub fn new() -> anyhow::Result<Self> {
        guard()?;
        let name = format!(
            "node-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        // Short, and in memory: a socket's path has at most 107 bytes.
        let dir = PathBuf::from("/run").join(&name);
        for part in ["pods", "log", "plugin"] {
            fs::create_dir_all(dir.join(part))
                .with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let netns = make_netns(&name)?;
        for command in [
            &["ip", "link", "add", "cni0", "type", "bridge"][..],
            &["ip", "addr", "add", "10.77.0.1/16", "dev", "cni0"],
            &["ip", "addr", "add", "fd77::1/64", "dev", "cni0", "nodad"],
            &["ip", "link", "set", "cni0", "up"],
        ] {
            exec_in(netns.path(), command)?;
        }
        fs::write(
            dir.join("pods/namespaces.yaml"),
            "kind: Namespace\nmetadata: {name: shop}\n",
        )?;
        let api = Api::new(&dir.join("inpod"))?;
        Ok(Self {
            name,
            dir,
            netns,
            api,
            processes: RefCell::default(),
            next_address: Cell::new(2),
            keep: Cell::new(false),
        })
    }

    /// A node on which everything runs and a ztunnel is up to date.
    ///
    /// # Errors
    ///
    /// When it does not come up.
    pub fn running() -> anyhow::Result<Self> {
        let node = Self::new()?;
        SERVICES
            .iter()
            .try_for_each(|service| node.start(service))?;
        node.start_ztunnel(&[])?;
        node.ready()?;
        Ok(node)
    }

    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's own network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The sockets of the services.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("inpod")
    }

    /// The directory of manifests.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("pods")
    }

    /// The services, as a person asks them.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Leaves everything running and in place when the value goes.
    pub fn keep(&self) {
        self.keep.set(true);
    }

    fn zds_socket(&self) -> PathBuf {
        self.dir.join("ztunnel/ztunnel.sock")
    }

    /// Starts a service of inpod.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(&self, service: &str) -> anyhow::Result<()> {
        let mut command = self.command(&bin(service)?);
        command.arg("--run-dir").arg(self.run_dir()).args([
            "--peer",
            "uid",
            "--log-format",
            "text",
            "--log-level",
            "debug",
        ]);
        match service {
            "pod-events" => {
                let from = format!("dir:{}", self.manifests().display());
                command.args(["--node-name", &self.name, "--pods-from", &from]);
                command.args([
                    "--propagation-wait-seconds",
                    "0",
                    "--drain-grace-seconds",
                    "30",
                ]);
            }
            "ztunnel-broker" => {
                command.arg("--zds-socket").arg(self.zds_socket());
            }
            _ => {}
        }
        self.spawn(service, command)
    }

    /// Starts the reference ztunnel.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start_ztunnel(&self, arguments: &[&str]) -> anyhow::Result<()> {
        self.start_ztunnel_as("ztunnel", arguments)
    }

    /// Starts one more reference ztunnel under a name of its own.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start_ztunnel_as(&self, name: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(&bin("reference-ztunnel")?);
        let state = self.dir.join(format!("{name}.json"));
        // What a ztunnel that was killed said of itself is no longer true.
        fs::remove_file(&state).unwrap_or_default();
        command
            .arg("--uds")
            .arg(self.zds_socket())
            .arg("--access-log")
            .arg(self.access_log());
        command.arg("--status").arg(state).args(arguments);
        self.spawn(name, command)
    }

    /// The reference ztunnel's access log.
    pub fn access_log(&self) -> PathBuf {
        self.dir.join("log/access.json")
    }

    /// What the reference ztunnel says of itself.
    ///
    /// # Errors
    ///
    /// When it has said nothing.
    pub fn ztunnel_state(&self) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_str(&fs::read_to_string(
            self.dir.join("ztunnel.json"),
        )?)?)
    }

    /// Connections that the ztunnel has taken.
    ///
    /// # Errors
    ///
    /// When its log cannot be read.
    pub fn accesses(&self) -> anyhow::Result<Vec<Access>> {
        Access::read(&self.access_log())
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.netns.path().display()))
            .arg(program)
            .env_clear();
        command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null());
        command
    }

    fn log(&self, process: &str) -> PathBuf {
        self.dir.join("log").join(process).with_extension("log")
    }

    fn spawn(&self, name: &str, mut command: Command) -> anyhow::Result<()> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log(name))?;
        command.stdout(log.try_clone()?).stderr(log);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        self.processes.borrow_mut().insert(name.to_owned(), child);
        Ok(())
    }

    /// Stops a process with a signal and waits for its end.
    ///
    /// # Errors
    ///
    /// When it was not running or does not end.
    pub fn stop(&self, name: &str, signal: Signal) -> anyhow::Result<()> {
        let mut child = self
            .processes
            .borrow_mut()
            .remove(name)
            .with_context(|| format!("{name} does not run"))?;
        kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        let ended = eventually(&format!("{name} ends"), PATIENCE, || {
            child
                .try_wait()
                .map_err(anyhow::Error::from)?
                .context("it runs")
        });
        if ended.is_err() {
            child.kill()?;
        }
        ended.map(drop)
    }

    /// The resident memory of a process in KiB.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub fn resident(&self, name: &str) -> anyhow::Result<u64> {
        let processes = self.processes.borrow();
        let pid = processes
            .get(name)
            .with_context(|| format!("{name} does not run"))?
            .id();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("no VmRSS")?;
        Ok(line.trim().trim_end_matches("kB").trim().parse()?)
    }

    /// The last lines that a process wrote.
    pub fn tail(&self, process: &str, lines: usize) -> String {
        let text = fs::read_to_string(self.log(process)).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..)
            .unwrap_or_default()
            .join("\n")
    }

    /// Waits until the agent serves ADD and a ztunnel is up to date.
    ///
    /// # Errors
    ///
    /// When that takes too long.
    pub fn ready(&self) -> anyhow::Result<()> {
        eventually(
            "the agent is ready and a ztunnel is up to date",
            PATIENCE,
            || {
                let status = self.api.status()?;
                let bad: Vec<_> = status
                    .conditions
                    .iter()
                    .filter(|condition| !condition.ok)
                    .collect();
                ensure!(
                    status.ready && bad.is_empty() && status.conditions.len() == 3,
                    "{bad:?}"
                );
                anyhow::Ok(())
            },
        )
    }

    /// Writes a pod's manifest.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write_manifest(&self, spec: &Spec) -> anyhow::Result<()> {
        let path = self
            .manifests()
            .join(format!("{}-{}.yaml", spec.namespace, spec.name));
        // Renamed into place, as tools do that care.
        fs::write(path.with_extension("tmp"), spec.manifest(&self.name))?;
        Ok(fs::rename(path.with_extension("tmp"), path)?)
    }

    /// A sandbox of a pod, its manifest written, as the chain leaves it for inpod.
    ///
    /// # Errors
    ///
    /// When a command fails.
    pub fn sandbox(&self, spec: Spec) -> anyhow::Result<Pod> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let host = self.next_address.replace(self.next_address.get() + 1);
        let netns = make_netns(&format!("cni-{}-{number}", std::process::id()))?;
        let veth = format!("veth{number}");
        self.write_manifest(&spec)?;
        let pod = Pod {
            spec,
            container_id: format!("{number:064x}"),
            veth,
            v4: (Ipv4Addr::new(10, 77, 0, 0).to_bits() + u32::from(host)).into(),
            v6: [0xfd77, 0, 0, 0, 0, 0, 0, host].into(),
            netns,
        };
        self.plug(&pod)?;
        Ok(pod)
    }

    fn plug(&self, pod: &Pod) -> anyhow::Result<()> {
        let netns = pod
            .path()
            .file_name()
            .and_then(|name| name.to_str())
            .context("a netns has a name")?;
        let (v4, v6) = (format!("{}/16", pod.v4), format!("{}/64", pod.v6));
        for command in [
            &[
                "ip", "link", "add", &pod.veth, "type", "veth", "peer", "name", "eth0", "netns",
                netns,
            ][..],
            &["ip", "link", "set", &pod.veth, "master", "cni0", "up"],
            &["ip", "-n", netns, "addr", "add", &v4, "dev", "eth0"],
            &[
                "ip", "-n", netns, "addr", "add", &v6, "dev", "eth0", "nodad",
            ],
            &["ip", "-n", netns, "link", "set", "eth0", "up"],
            &[
                "ip",
                "-n",
                netns,
                "route",
                "add",
                "default",
                "via",
                "10.77.0.1",
            ],
            &[
                "ip", "-n", netns, "-6", "route", "add", "default", "via", "fd77::1",
            ],
        ] {
            exec_in(self.netns.path(), command)?;
        }
        Ok(())
    }

    /// Whether the host side of a pod's veth is there.
    pub fn has_veth(&self, pod: &Pod) -> bool {
        exec_in(self.netns.path(), &["ip", "link", "show", &pod.veth]).is_ok()
    }

    /// The call that a runtime makes.
    pub fn call(&self, verb: fn(&Pod, &Path, &Path) -> Call, pod: &Pod) -> Call {
        verb(
            pod,
            &daemon::socket(&self.run_dir(), "pod-events"),
            &self.dir.join("plugin"),
        )
    }

    /// ADD, which must succeed.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub fn add(&self, pod: &Pod) -> anyhow::Result<Outcome> {
        let outcome = self.call(Call::add, pod).run()?;
        ensure!(outcome.code == 0, "ADD of {}: {outcome:?}", pod.spec.name);
        Ok(outcome)
    }

    /// Both DELs of a runtime, which must succeed, and the end of the netns between them.
    ///
    /// # Errors
    ///
    /// When they do not.
    pub fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        let first = self.call(Call::del, pod).run()?;
        ensure!(
            first.code == 0 && first.stdout.is_empty(),
            "DEL of {}: {first:?}",
            pod.spec.name
        );
        pod.unmount()?;
        let second = self.call(Call::del_again, pod).run()?;
        ensure!(
            second.code == 0 && second.stdout.is_empty(),
            "second DEL of {}: {second:?}",
            pod.spec.name
        );
        Ok(())
    }

    /// A sandbox whose ADD has succeeded.
    ///
    /// # Errors
    ///
    /// When it does not succeed.
    pub fn pod(&self, spec: Spec) -> anyhow::Result<Pod> {
        let pod = self.sandbox(spec)?;
        self.add(&pod)?;
        Ok(pod)
    }

    /// Everything that is known of a pod.
    ///
    /// # Errors
    ///
    /// When nothing is.
    pub fn explain(&self, spec: &Spec) -> anyhow::Result<ExplainPodResponse> {
        self.api.explain(&spec.namespace, &spec.name)
    }

    /// Waits until a pod stands somewhere.
    ///
    /// # Errors
    ///
    /// When it does not come there.
    pub fn until(
        &self,
        spec: &Spec,
        state: PodState,
        patience: Duration,
    ) -> anyhow::Result<ExplainPodResponse> {
        eventually(
            &format!("{} is {}", spec.name, state.as_str_name()),
            patience,
            || {
                let known = self.explain(spec)?;
                ensure!(known.state() == state, "{known:?}");
                anyhow::Ok(known)
            },
        )
    }

    /// Waits until a pod is enrolled with exactly its rules and a ztunnel's word.
    ///
    /// # Errors
    ///
    /// When it does not come to that.
    pub fn until_whole(&self, spec: &Spec) -> anyhow::Result<ExplainPodResponse> {
        eventually(
            &format!("{} is wholly in the mesh", spec.name),
            PATIENCE,
            || {
                let known = self.explain(spec)?;
                ensure!(known.state() == PodState::Enrolled, "{known:?}");
                let rules = known.rules.as_ref().context("no rules reported")?;
                ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
                ensure!(
                    known
                        .ztunnels
                        .iter()
                        .any(|ztunnel| ztunnel.state == "added"),
                    "{:?}",
                    known.ztunnels
                );
                anyhow::Ok(known)
            },
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for process in SERVICES.iter().chain(&["ztunnel"]) {
                eprint_tail(process, &self.tail(process, 40));
            }
        }
        if self.keep.get() {
            return;
        }
        for child in self.processes.borrow_mut().values_mut() {
            // Ended already, or ends now.
            child.kill().unwrap_or_default();
            child.wait().map(drop).unwrap_or_default();
        }
        run("ip", &["netns", "del", &self.name])
            .map(drop)
            .unwrap_or_default();
        fs::remove_dir_all(&self.dir).unwrap_or_default();
    }
}

#[expect(
    clippy::print_stderr,
    reason = "what a failed test leaves behind for its reader"
)]
fn eprint_tail(process: &str, tail: &str) {
    eprintln!("--- {process}\n{tail}");
}
