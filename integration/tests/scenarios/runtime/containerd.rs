//! A real containerd with runc, and a kubelet's actions.

use std::{
    fs,
    os::unix::{fs::MetadataExt as _, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use integration::{Node, Pod, Spec, TIMEOUT, eventually, run};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{getsockopt, sockopt::PeerCredentials},
    },
    unistd::Pid,
};
use serde_json::Value;
use tonic::Status;

use crate::runtime::{
    chain::{Chain, veths},
    cri::{Cri, Linux, Metadata, NamespaceOption, PodSandboxConfig, PortMapping, SecurityContext},
    image,
};

/// The first process of containerd's pid namespace. libcni always caches below `/var/lib`. containerd is restarted,
/// as an init system would do.
const INIT: &str = r#"mount --bind "$1/var" /var/lib && mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
while :; do containerd --config "$0"; sleep 0.1; done"#;

/// The id of the kernel's boot (random(4)).
pub(crate) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

const SOCKET: &str = "grpc.sock";

/// All of inpod on one node with a containerd.
#[derive(Debug)]
pub(crate) struct Runtime {
    process: Child,
    pub(crate) dir: PathBuf,
    pub(crate) cri: Cri,
    pub(crate) chain: Chain,
    pub(crate) node: Node,
}

impl Runtime {
    /// Starts it with the chain in place and the image imported.
    pub(crate) fn running() -> anyhow::Result<Self> {
        Self::with(&[])
    }

    /// Starts it with additional keys in our chain entry.
    pub(crate) fn with(keys: &[(&str, Value)]) -> anyhow::Result<Self> {
        let runtime = Self::on(Node::running()?)?;
        runtime.chain.configure(keys)?;
        Ok(runtime)
    }

    /// Starts it on an existing node.
    pub(crate) fn on(node: Node) -> anyhow::Result<Self> {
        let dir = node.manifests().with_file_name("containerd");
        fs::create_dir_all(dir.join("var"))?;
        fs::copy(BOOT_ID, dir.join("boot_id"))?;
        let chain = Chain::install(&node, &dir)?;
        let archive = image::write(&dir)?;
        fs::write(dir.join("config.toml"), config(&dir, &chain))?;
        let runtime = Self {
            process: start(&node, &dir)?,
            cri: Cri::new(&dir.join(SOCKET))?,
            dir,
            chain,
            node,
        };
        runtime.until_ready()?;
        runtime.import(&archive, image::NAME)?;
        Ok(runtime)
    }

    pub(crate) fn until_ready(&self) -> anyhow::Result<()> {
        eventually("containerd is ready", TIMEOUT, || {
            for condition in ["RuntimeReady", "NetworkReady"] {
                ensure!(self.cri.condition(condition)?, "not {condition}");
            }
            anyhow::Ok(())
        })
    }

    /// Waits until containerd has read a conflist with our plugin, or without.
    pub(crate) fn until_chained(&self, expected: bool) -> anyhow::Result<()> {
        eventually("the list is read", TIMEOUT, || {
            let lists = self.cri.lists()?;
            let found = lists.contains("inpod-cni");
            ensure!(found == expected, "we are in it: {found}: {lists:?}");
            anyhow::Ok(())
        })
    }

    /// Runs containerd's own client in the CRI's namespace.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let socket = self.dir.join(SOCKET).display().to_string();
        let client = ["-a", &socket, "-n", "k8s.io"];
        run("ctr", &[&client[..], arguments].concat())
    }

    /// Returns a program's output in a container with netconfig's capabilities, which is deleted afterwards.
    pub(crate) fn contained(&self, image: &str, command: &[&str]) -> anyhow::Result<String> {
        let cgroup = format!("/{}/contained", self.cgroup());
        let mut run = vec![
            "run",
            "--rm",
            "--snapshotter",
            "native",
            "--cgroup",
            &cgroup,
        ];
        run.extend([
            "--cap-add",
            "CAP_NET_ADMIN",
            "--cap-add",
            "CAP_NET_RAW",
            image,
            "it",
        ]);
        self.ctr(&[&run[..], command].concat())
    }

    pub(crate) fn import(&self, archive: &Path, name: &str) -> anyhow::Result<()> {
        let archive = archive.display().to_string();
        self.ctr(&["images", "import", "--snapshotter", "native", &archive])?;
        eventually("the image is known to the CRI", TIMEOUT, || {
            ensure!(self.cri.has_image(name)?, "it is not");
            anyhow::Ok(())
        })
    }

    pub(crate) fn config(&self, spec: &Spec) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(Metadata {
                name: spec.name.clone(),
                uid: spec.uid.clone(),
                namespace: spec.namespace.clone(),
                attempt: 0,
            }),
            log_directory: self.dir.join("log").display().to_string(),
            port_mappings: Vec::new(),
            linux: Some(Linux {
                cgroup_parent: format!("/{}/kubepods/besteffort/pod{}", self.cgroup(), spec.uid),
                security_context: None,
            }),
        }
    }

    /// Returns the cgroup of all pods. Nodes may share a name, but no two live netns have the same inode.
    fn cgroup(&self) -> String {
        let inode = fs::metadata(self.node.netns().path()).map_or(0, |netns| netns.ino());
        format!("{}-{inode}", self.node.name())
    }

    pub(crate) fn pod(&self, spec: Spec) -> anyhow::Result<Pod> {
        self.node.write_manifest(&spec)?;
        let id = self.cri.run(self.config(&spec))?;
        self.sandbox(spec, &id)
    }

    pub(crate) fn pod_at_port(&self, spec: Spec, host: i32, container: i32) -> anyhow::Result<Pod> {
        self.node.write_manifest(&spec)?;
        let port_mappings = vec![PortMapping {
            container_port: container,
            host_port: host,
        }];
        let config = self.config(&spec);
        let id = self.cri.run(PodSandboxConfig {
            port_mappings,
            ..config
        })?;
        self.sandbox(spec, &id)
    }

    /// Runs it in the node's network; returns the id.
    pub(crate) fn host_network(&self, spec: &Spec) -> anyhow::Result<String> {
        let mut config = self.config(spec);
        if let Some(linux) = &mut config.linux {
            let namespaces = Some(NamespaceOption { network: 2, pid: 0 });
            linux.security_context = Some(SecurityContext { namespaces });
        }
        Ok(self.cri.run(config)?)
    }

    pub(crate) fn sandbox(&self, spec: Spec, id: &str) -> anyhow::Result<Pod> {
        let status = self.cri.status(id)?;
        ensure!(
            status
                .status
                .as_ref()
                .is_some_and(|sandbox| sandbox.state == 0),
            "the sandbox is not ready: {status:?}"
        );
        let info: Value = serde_json::from_str(status.info.get("info").context("no info")?)?;
        let at = |pointer: &str| info.pointer(pointer).context(pointer.to_owned());
        let text = |pointer: &str| anyhow::Ok(at(pointer)?.as_str().context("no text")?.to_owned());
        let interfaces = at("/cniResult/Interfaces")?
            .as_object()
            .context("no object")?;
        let veth = interfaces.keys().find(|name| name.starts_with("veth"));
        let netns = text("/cniResult/Interfaces/eth0/Sandbox")?;
        Ok(Pod {
            spec,
            container_id: id.to_owned(),
            netns: Netns::open(Path::new(&netns), &["/var/run/netns".into()])?,
            veth: veth.context("no veth")?.clone(),
            v4: text("/cniResult/Interfaces/eth0/IPConfigs/0/IP")?.parse()?,
            v6: text("/cniResult/Interfaces/eth0/IPConfigs/1/IP")?.parse()?,
        })
    }

    /// Calls StopPodSandbox and RemovePodSandbox.
    pub(crate) fn end(&self, id: &str) -> Result<(), Status> {
        self.cri.stop(id)?;
        self.cri.remove(id)
    }

    /// The sandboxes survive containerd's restart.
    pub(crate) fn restart_containerd(&self) -> anyhow::Result<()> {
        self.kill_containerd()?;
        self.until_ready()
    }

    /// Its init starts containerd again.
    pub(crate) fn kill_containerd(&self) -> anyhow::Result<()> {
        let before = self.containerd()?;
        kill(before, Signal::SIGKILL)?;
        eventually("another containerd listens", TIMEOUT, || {
            let now = self.containerd()?;
            ensure!(now != before, "{now} is the old one");
            anyhow::Ok(())
        })
    }

    /// Ends containerd and all it runs, as a power cut does.
    pub(crate) fn cut_power(&mut self) {
        end(&mut self.process);
    }

    pub(crate) fn boot(&mut self) -> anyhow::Result<()> {
        self.process = start(&self.node, &self.dir)?;
        self.until_ready()
    }

    pub(crate) fn client(&self) -> anyhow::Result<Cri> {
        Cri::new(&self.dir.join(SOCKET))
    }

    fn containerd(&self) -> anyhow::Result<Pid> {
        let stream = UnixStream::connect(self.dir.join(SOCKET))?;
        Ok(Pid::from_raw(getsockopt(&stream, PeerCredentials)?.pid()))
    }

    pub(crate) fn log(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.dir.join("containerd.log"))?)
    }

    /// Waits until no claim, workload, veth pair, address or sandbox is left.
    pub(crate) fn until_empty(&self) -> anyhow::Result<()> {
        eventually("nothing is left on the node", TIMEOUT, || {
            let api = self.node.api();
            let (claims, workloads) = (api.claims()?, api.workloads()?.workloads);
            ensure!(
                (&claims, &workloads) == (&vec![], &vec![]),
                "{claims:?} {workloads:?}"
            );
            let (pairs, addresses) = (veths(&self.node)?, self.chain.addresses()?);
            ensure!(
                pairs.is_empty() && addresses.is_empty(),
                "{pairs:?} {addresses:?}"
            );
            let sandboxes = self.cri.sandboxes()?;
            ensure!(sandboxes.is_empty(), "{sandboxes:?}");
            anyhow::Ok(())
        })
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log().unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines
                .get(lines.len().saturating_sub(60)..)
                .unwrap_or_default();
            eprintln!("--- containerd and the plugins\n{}", tail.join("\n"));
        }
        end(&mut self.process);
        remove_cgroups(&self.cgroup());
    }
}

/// A pid namespace ends with its first process.
pub(crate) fn end(process: &mut Child) {
    process.kill().unwrap_or_default();
    process.wait().map(drop).unwrap_or_default();
}

/// Removes them in every hierarchy, as soon as they are empty.
pub(crate) fn remove_cgroups(name: &str) {
    let script = format!(
        "for _ in $(seq 100); do
           found=$(find /sys/fs/cgroup -maxdepth 7 -depth -type d \\( -name '{name}' -o -path '*/{name}/*' \\))
           [ -z \"$found\" ] && exit; rmdir $found 2>/dev/null; sleep 0.05
         done"
    );
    run("sh", &["-c", &script]).map(drop).unwrap_or_default();
}

fn start(node: &Node, dir: &Path) -> anyhow::Result<Child> {
    let log = fs::File::create(dir.join("containerd.log"))?;
    let mut command = isolated(node);
    command
        .args(["sh", "-c", INIT])
        .arg(dir.join("config.toml"))
        .arg(dir);
    command.stdout(log.try_clone()?).stderr(log);
    command.spawn().context("cannot start containerd")
}

/// Returns a command on the node's network, with its own pid namespace, which ends with it, and private
/// mounts except network namespaces.
pub(crate) fn isolated(node: &Node) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", node.netns().path().display()));
    command.args(["unshare", "--mount", "--propagation", "unchanged"]);
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.stdin(Stdio::null());
    command
}

/// containerd 1.6 to 2.x read version 2.
fn config(dir: &Path, chain: &Chain) -> String {
    let (plugins, lists) = (chain.plugins(), chain.lists());
    let (dir, plugins, lists) = (dir.display(), plugins.display(), lists.display());
    let image = image::NAME;
    format!(
        r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
[grpc]
address = "{dir}/grpc.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{dir}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{lists}"
"#
    )
}
