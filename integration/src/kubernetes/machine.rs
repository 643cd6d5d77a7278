//! The machine of a node, which has its own network, mounts, pids and cgroups, with containerd and a kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail, ensure};
use inpod_linux::Netns;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{LONG, NodeConfig, files, image::Image, is, logs};
use crate::{
    Access, ApiServer, TIMEOUT,
    apiserver::process::spawn,
    eventually,
    pod::{exec_in, make_netns},
    run,
};

/// A machine that can boot and lose power. Files survive a boot, except those in `/run`.
#[derive(Debug)]
pub struct Machine {
    pub node: NodeConfig,
    name: String,
    dir: PathBuf,
    running: Mutex<Option<Running>>,
    server: Arc<ApiServer>,
}

#[derive(Debug)]
struct Running {
    process: Child,
    netns: Netns,
}

impl Machine {
    /// Creates a machine that is off, with all files on its disk.
    pub(super) fn new(server: Arc<ApiServer>, node: NodeConfig) -> anyhow::Result<Self> {
        // A process in another isolation may have the same process number.
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let name = format!("inpod-node-{now}");
        let dir = PathBuf::from("/run").join(&name);
        files::write(&server, &dir, &node)?;
        Ok(Self {
            node,
            name,
            dir,
            running: Mutex::default(),
            server,
        })
    }

    /// Puts the archive of an image on the machine, which imports the image when it boots.
    pub(super) fn provide(&self, archive: &Path) -> anyhow::Result<()> {
        let name = archive.file_name().context("a file has a name")?;
        Ok(fs::hard_link(archive, self.dir.join("images").join(name))?)
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the machine, and waits until Kubernetes reports a ready node. A busy machine takes minutes for the images.
    pub fn boot(&self) -> anyhow::Result<()> {
        self.switch_on()?;
        self.until_ready()
    }

    /// Waits until Kubernetes reports that the node is ready since the last start.
    pub fn until_ready(&self) -> anyhow::Result<()> {
        let (name, began) = (self.node.name(), SystemTime::now());
        eventually(&format!("{name} is ready"), 3 * LONG, || {
            let node = self.server.get(&format!("/api/v1/nodes/{name}"))?;
            ensure!(
                is(&node, "Ready"),
                "{}",
                node.pointer("/status/conditions").unwrap_or(&node)
            );
            // The node of an earlier boot counts as ready until its lease expires, so the kubelet's log decides.
            let told = fs::read_to_string(self.dir.join("log/kubelet.log"))?;
            ensure!(
                told.contains("Fast updating node status as it just became ready")
                    || began.elapsed()? > TIMEOUT,
                "not yet"
            );
            anyhow::Ok(())
        })
    }

    pub fn switch_on(&self) -> anyhow::Result<()> {
        let netns = self.network()?;
        fs::remove_file(self.dir.join("log/kubelet.log")).unwrap_or_default();
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", netns.path().display()))
            .arg("sh")
            .arg(self.dir.join("node.sh"))
            .arg(&self.name)
            .arg(&self.dir)
            .args(files::init(&self.node)?)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null());
        let process = spawn(command, &self.dir.join("log/node.log"))?;
        *self.running() = Some(Running { process, netns });
        Ok(())
    }

    fn network(&self) -> anyhow::Result<Netns> {
        let netns = make_netns(&self.name)?;
        self.server.plug_at(&netns, self.node.host())?;
        for setting in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            exec_in(netns.path(), &["sysctl", "-qw", setting])?;
        }
        // A packet needs a route before its address can be translated.
        for services in ["10.79.0.0/24", "fd79::/112"] {
            let route = ["ip", "route", "add", services, "dev", "api0"];
            exec_in(netns.path(), &route)?;
        }
        for number in (1..=NodeConfig::MOST).filter(|number| *number != self.node.number) {
            let other = NodeConfig {
                number,
                ..self.node
            };
            other.route_from(netns.path())?;
        }
        Ok(netns)
    }

    /// Ends every process at once, and empties the files in memory.
    pub fn cut_power(&self) -> anyhow::Result<()> {
        let mut running = self.running().take().context("the machine is off")?;
        running.process.kill()?;
        running.process.wait()?;
        drop(running);
        let cgroups = eventually("its cgroups are gone", TIMEOUT, || self.remove_cgroups());
        // A network namespace and its link live on for a while after the name was deleted.
        let wire = format!("api{}", self.node.host());
        exec_in(self.server.netns().path(), &["ip", "link", "del", &wire])?;
        run("ip", &["netns", "del", &self.name])?;
        let memory = self.dir.join("run");
        fs::remove_dir_all(&memory)?;
        fs::create_dir(&memory)?;
        cgroups
    }

    pub fn reboot(&self) -> anyhow::Result<()> {
        self.cut_power()?;
        self.boot()
    }

    /// Removes the machine's cgroups in every hierarchy, once they are empty.
    fn remove_cgroups(&self) -> anyhow::Result<()> {
        // The search goes depth first; the second search finds the cgroups that remain.
        let script = format!(
            "ours() {{ find /sys/fs/cgroup -depth -type d -path '*/{}*' \"$@\"; }}
             ours -exec rmdir {{}} \\; 2>/dev/null; ours",
            self.name
        );
        let left = run("sh", &["-c", &script])?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    }

    /// Returns the pid of the first process as seen from outside.
    fn first(&self) -> anyhow::Result<u32> {
        let running = self.running();
        let process = &running.as_ref().context("the machine is off")?.process;
        let parent = process.id().to_string();
        let printed = run("pgrep", &["-P", &parent])?;
        Ok(printed.trim().parse()?)
    }

    /// Runs a command on the machine outside any pod, within 30 s.
    pub fn exec(&self, command: &[&str]) -> anyhow::Result<String> {
        let target = self.first()?.to_string();
        let within = [
            "--target", &target, "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup",
            "timeout", "30",
        ];
        run("nsenter", &[&within, command].concat())
    }

    /// Returns the path of a file below `/run`, `/opt`, `/var/lib` or `/var/log`, or of a file that the test wrote to
    /// `/etc`.
    pub fn file(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// Returns a path in the machine's own view of `/etc`. Fails while the machine is off.
    pub fn etc(&self, path: &str) -> anyhow::Result<PathBuf> {
        let root = format!("/proc/{}/root/etc", self.first()?);
        Ok(Path::new(&root).join(path))
    }

    pub fn netns(&self) -> anyhow::Result<PathBuf> {
        let running = self.running();
        let running = running.as_ref().context("the machine is off")?;
        Ok(running.netns.path().to_owned())
    }

    pub fn primary(&self) -> String {
        self.node.list().to_string()
    }

    /// Writes the primary network configuration, which every machine has initially.
    pub fn write_primary(&self) -> anyhow::Result<()> {
        files::primary(&self.etc("")?, &self.node)
    }

    /// Removes the primary network configuration, so that the machine lacks a network.
    pub fn remove_primary(&self) -> anyhow::Result<()> {
        Ok(fs::remove_file(self.etc(files::PRIMARY)?)?)
    }

    pub fn load(&self, image: &Image) -> anyhow::Result<()> {
        let archive = image.write(&self.dir.join("images"))?;
        let name = archive.file_name().context("a file has a name")?;
        let seen = Path::new("/srv/images").join(name);
        let import = ["ctr", "-n", "k8s.io", "images", "import"];
        self.exec(&[&import[..], &[&seen.display().to_string()]].concat())?;
        Ok(fs::remove_file(archive)?)
    }

    /// Returns the processes in the containers of a pod, with pids as seen from outside.
    pub fn pids(&self, uid: &str) -> anyhow::Result<Vec<u32>> {
        let place = format!("/pod{uid}/");
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A process that has ended has no cgroup to read.
            let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            if cgroup.contains(&self.name) && cgroup.contains(&place) {
                pids.push(pid);
            }
        }
        Ok(pids)
    }

    pub fn netns_of(&self, uid: &str) -> anyhow::Result<Netns> {
        let pids = self.pids(uid)?;
        let pid = pids
            .first()
            .with_context(|| format!("nothing of {uid} runs"))?;
        let path = format!("/proc/{pid}/ns/net");
        Ok(Netns::open(Path::new(&path), &["/proc".into()])?)
    }

    /// Sends a signal to the processes of a program in a pod; the program is named by its path in the container.
    pub fn kill(&self, uid: &str, program: &str, signal: Signal) -> anyhow::Result<()> {
        let runs = |pid: &u32| {
            let found = fs::read_link(format!("/proc/{pid}/exe"));
            found.is_ok_and(|path| path == Path::new(program))
        };
        let Some(pid) = self.pids(uid)?.into_iter().find(runs) else {
            bail!("{program} does not run in {uid}");
        };
        Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?)
    }

    /// Returns the connections that the ztunnels of this boot and earlier boots accepted.
    pub fn accesses(&self) -> anyhow::Result<Vec<Access>> {
        Access::read(&self.dir.join("var/log/ztunnel/access.json"))
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Returns the container logs of a pod in order, as long as the pod exists.
    pub fn log_of(&self, uid: &str) -> anyhow::Result<String> {
        let ours = |path: &PathBuf| path.display().to_string().contains(uid);
        let files = logs::files(&self.pod_logs(), 3).into_iter().filter(ours);
        Ok(files.map(fs::read_to_string).collect::<Result<_, _>>()?)
    }

    pub(super) fn pod_logs(&self) -> PathBuf {
        self.dir.join("var/log/pods")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.running().is_some() {
            // An error is ignored, because the next test names the remains.
            self.cut_power().unwrap_or_default();
        }
        fs::remove_dir_all(&self.dir).unwrap_or_default();
    }
}
