//! A process takes over one container of the agent, and tries to reach the others. The containers have the chart's
//! capabilities, users, mounts and settings; `deploy/docs/security.md` shows the result.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::ensure;
use integration::{Node, TIMEOUT, bin, chart, eventually};
use serde_json::Value;

const MANIFEST: &str = include_str!("../../../../deploy/manifests/combined.yaml");

const PAGE: &str = include_str!("../../../../deploy/docs/security.md");

const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Becomes a container: ROOT CAPABILITIES MOUNTS PROGRAM..., of which MOUNTS are lines "FROM TO".
const CONTAINER: &str = r#"
set -e
root=$1 capabilities=$2 mounts=$3
shift 3
mkdir -p "$root" && mount -t tmpfs none "$root"
for directory in /bin /sbin /lib /lib64 /usr /proc /dev; do
  if [ -L "$directory" ]; then cp -P "$directory" "$root"
  elif [ -d "$directory" ]; then mkdir "$root$directory" && mount --rbind "$directory" "$root$directory"
  fi
done
echo "$mounts" | while read -r from to; do
  mkdir -p "$root$to" && mount --bind "$from" "$root$to"
done
exec chroot "$root" setpriv --no-new-privs --bounding-set "$capabilities" "$@"
"#;

/// Prints what the processes PID... allow, and which of the node's files are in sight.
const ATTACK: &str = r#"
for pid; do
  allowed=
  ls /proc/$pid/root/ >/dev/null && allowed="$allowed root"
  ls /proc/$pid/cwd/ >/dev/null && allowed="$allowed cwd"
  ls -L /proc/$pid/fd/2 >/dev/null && allowed="$allowed fd"
  cat /proc/$pid/environ >/dev/null && allowed="$allowed environ"
  # Needs the permission to trace the process.
  (exec 3<>/proc/$pid/mem) && allowed="$allowed mem"
  ls -L /proc/$pid/ns/mnt >/dev/null && allowed="$allowed ns"
  cat /proc/$pid/exe >/dev/null && allowed="$allowed exe"
  echo "process $pid:$allowed"
done 2>/dev/null
for path in /var/run/secrets/kubernetes.io/serviceaccount /host/opt/cni/bin /host/etc/cni/net.d; do
  ls "$path" >/dev/null 2>&1 && echo "path: $path"
done
for socket in /run/inpod/*/*.sock /var/run/ztunnel/*.sock; do
  [ -S "$socket" ] && echo "socket: ${socket#/run/inpod/}"
done
"#;

/// A container of the agent's pod.
struct Container {
    name: String,
    capabilities: String,
    /// Pairs of a path of the node and a path of the container.
    mounts: Vec<(PathBuf, String)>,
    environment: Vec<(String, String)>,
}

/// A process of a container, ended on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

/// A node on which the chart's containers run.
struct Machine {
    node: Node,
    base: PathBuf,
    containers: Vec<Container>,
}

impl Machine {
    fn new() -> Self {
        let node = Node::new().unwrap();
        let base = PathBuf::from("/run").join(node.name());
        let settings = chart::containers(MANIFEST).unwrap();
        let containers = settings.into_iter().map(|container| {
            let mounts = mounts(&base.join("host"), &container.name);
            Container {
                name: container.name,
                capabilities: container.capabilities,
                mounts,
                environment: container.environment,
            }
        });
        let machine = Self {
            containers: containers.collect(),
            node,
            base,
        };
        for (from, _) in machine.containers.iter().flat_map(|it| &it.mounts) {
            fs::create_dir_all(from).unwrap();
        }
        fs::write(
            machine.base.join("host").join(&TOKEN[1..]).join("token"),
            "secret",
        )
        .unwrap();
        fs::create_dir(machine.base.join("programs")).unwrap();
        machine
    }

    /// Prepares a program in a container; the result must outlive no part of the machine.
    fn command(&self, container: &Container, program: &[&str]) -> Command {
        let number = fs::read_dir(&self.base).unwrap().count();
        let root = self.base.join(format!("root-{number}"));
        let programs = (self.base.join("programs"), "/programs".to_owned());
        let mounts = container.mounts.iter().chain([&programs]);
        let mounts = mounts.map(|(from, to)| format!("{} {to}", from.display()));
        let mounts: Vec<_> = mounts.collect();
        let net = format!("--net={}", self.node.netns().path().display());
        let mut command = Command::new("nsenter");
        command
            .args([&net, "unshare", "--mount", "--propagation", "private"])
            .args(["sh", "-c", CONTAINER, "sh"])
            .arg(root)
            .args([&container.capabilities, &mounts.join("\n")])
            .args(program)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Starts a service with a binary that its user may read: where it may not, the kernel protects it from the start.
    fn start(&self, container: &Container) -> Process {
        let program = self.base.join("programs").join(&container.name);
        fs::copy(bin(&container.name).unwrap(), &program).unwrap();
        let name = format!("/programs/{}", container.name);
        let log = self.base.join(format!("log/{}.log", container.name));
        let log = fs::File::create(log).unwrap();
        let mut command = self.command(container, &[&name]);
        command
            .envs(container.environment.iter().cloned())
            .env("INPOD_PEER", "uid")
            .stderr(log);
        if container.name == "pod-events" {
            command
                .env("INPOD_NODE_NAME", self.node.name())
                .env("INPOD_PODS_FROM", "dir:/var/lib/inpod/plugin");
        }
        Process(command.spawn().unwrap())
    }

    /// Returns what a process in the container is allowed of other processes, and the lines about files.
    fn attack(&self, container: &Container, pids: &[u32]) -> (BTreeMap<u32, String>, Vec<String>) {
        let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
        let program: Vec<_> = ["bash", "-c", ATTACK, "bash"].into_iter().collect();
        let pids = pids.iter().map(String::as_str);
        let program: Vec<_> = program.into_iter().chain(pids).collect();
        let output = self.command(container, &program).output().unwrap();
        let printed = String::from_utf8(output.stdout.clone()).unwrap();
        let (of_processes, files): (Vec<_>, Vec<_>) = printed
            .lines()
            .partition(|line| line.starts_with("process "));
        assert!(!of_processes.is_empty(), "{output:?}");
        let parse = |line: &str| {
            let (pid, allowed) = line.strip_prefix("process ")?.split_once(':')?;
            Some((pid.parse().ok()?, allowed.trim().to_owned()))
        };
        let of_processes = of_processes.into_iter().map(|line| parse(line).unwrap());
        (
            of_processes.collect(),
            files.into_iter().map(str::to_owned).collect(),
        )
    }
}

/// Returns the mounts of a container in the manifest. The node's files are below `host`.
fn mounts(host: &Path, container: &str) -> Vec<(PathBuf, String)> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(MANIFEST).unwrap();
    let is_daemonset = |document: &&Value| document["kind"] == "DaemonSet";
    let spec = &documents.iter().find(is_daemonset).unwrap()["spec"]["template"]["spec"];
    let named = |list: &Value, name: &Value| {
        let mut items = list.as_array().unwrap().iter();
        items.find(|item| item["name"] == *name).unwrap().clone()
    };
    let container = named(&spec["containers"], &container.into());
    let mounts = container["volumeMounts"].as_array().unwrap().iter();
    let mounts = mounts.map(|mount| {
        let path = mount["mountPath"].as_str().unwrap();
        let volume = named(&spec["volumes"], &mount["name"]);
        let from = volume["hostPath"]["path"].as_str().unwrap_or(path);
        (host.join(from.trim_start_matches('/')), path.to_owned())
    });
    mounts.collect()
}

/// Returns the row of the page's table for one container.
fn row(name: &str, others: &[&str], files: &[String]) -> String {
    let has = |path: &str| files.iter().any(|line| line == &format!("path: {path}"));
    let is_reached = others.iter().any(|allowed| !allowed.is_empty());
    let cell = |is_own| match (is_own, is_reached) {
        (true, _) => "its own",
        (false, true) => "through `/proc`",
        (false, false) => "denied",
    };
    let processes = if is_reached { "allowed" } else { "denied" };
    let sockets = files
        .iter()
        .filter_map(|line| line.strip_prefix("socket: "));
    let sockets: Vec<_> = sockets.map(|socket| format!("`{socket}`")).collect();
    format!(
        "| `{name}` | {processes} | {} | {} | {} |",
        cell(has(TOKEN)),
        cell(has("/host/opt/cni/bin") && has("/host/etc/cni/net.d")),
        sockets.join(", ")
    )
}

#[test]
fn a_container_that_is_taken_over_reaches_no_neighbor() {
    let machine = Machine::new();
    let services: Vec<_> = machine
        .containers
        .iter()
        .map(|it| machine.start(it))
        .collect();
    let run_dir = machine.base.join("host/run/inpod");
    eventually("every service has its socket", TIMEOUT, || {
        for container in &machine.containers {
            let socket = inpod_service::socket(&run_dir, &container.name);
            let log = machine.node.tail(&container.name, 5);
            ensure!(socket.exists(), "{} has none: {log}", container.name);
        }
        anyhow::Ok(())
    })
    .unwrap();
    // A process that does not protect itself, in a container without a capability, shows that the attempts work.
    let unprotected = machine
        .containers
        .iter()
        .find(|it| it.capabilities == "-all")
        .unwrap();
    let mut sleeper = machine.command(unprotected, &["sleep", "600"]);
    let sleeper = Process(sleeper.stdin(Stdio::null()).spawn().unwrap());
    eventually("sleep runs", TIMEOUT, || {
        let command = fs::read_to_string(format!("/proc/{}/comm", sleeper.0.id()))?;
        ensure!(command == "sleep\n", "{command}");
        anyhow::Ok(())
    })
    .unwrap();

    let pids: Vec<_> = services
        .iter()
        .chain([&sleeper])
        .map(|it| it.0.id())
        .collect();
    let mut rows = Vec::new();
    for (container, service) in machine.containers.iter().zip(&services) {
        let (allowed, files) = machine.attack(container, &pids);
        let of_sleeper = &allowed[&sleeper.0.id()];
        assert_eq!(
            of_sleeper, "root cwd fd environ mem ns exe",
            "{}",
            container.name
        );
        let is_neighbor = |pid: &&u32| ![service.0.id(), sleeper.0.id()].contains(*pid);
        let others: Vec<_> = pids
            .iter()
            .filter(is_neighbor)
            .map(|pid| &*allowed[pid])
            .collect();
        rows.push(row(&container.name, &others, &files));
    }
    for row in &rows {
        assert!(
            PAGE.contains(row.as_str()),
            "the page lacks:\n{}",
            rows.join("\n")
        );
    }
}
