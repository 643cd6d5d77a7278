//! Runs a real istio-cni: its programs, with the settings and rights that its chart gives by default.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{ApiServer, Call, Node, eventually, run};

/// The time for a start. ztunnel reconnects within 15 s, and istio-cni's pods end within 30 s; the reconciliation of a
/// full node takes longer.
const START: Duration = Duration::from_secs(300);

/// The value of `terminationGracePeriodSeconds` in the chart.
const GRACE: Duration = Duration::from_secs(30);

const NAMESPACE: &str = "/api/v1/namespaces/istio-system";
const DAEMONSET: &str = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node";

/// Returns the directory of the programs that `need_istio_cni` of `integration/setup.sh` provides.
pub fn istio_cni_programs() -> anyhow::Result<PathBuf> {
    let dir = std::env::var_os("ISTIO_CNI").map(PathBuf::from);
    let found = dir.filter(|dir| dir.join("install-cni").is_file());
    found
        .context("ISTIO_CNI names no directory with install-cni: run ./integration/test kubernetes")
}

/// The objects of the chart that istio-cni's processes or the tests read.
const OBJECTS: &str = include_str!("istio_cni/objects.yaml");

/// A real istio-cni on a node.
#[derive(Debug)]
pub struct IstioCni {
    server: Arc<ApiServer>,
    programs: PathBuf,
    node: String,
    /// The argument of nsenter that selects the node's network.
    network: String,
    kubeconfig: PathBuf,
    zds_socket: PathBuf,
    dir: PathBuf,
    process: Option<Child>,
}

impl IstioCni {
    /// Prepares istio-cni on a node. The directory contains the node's `host/`, with its CNI directories.
    pub fn new(server: &Arc<ApiServer>, node: &Node, programs: &Path, dir: &Path) -> Self {
        Self {
            server: Arc::clone(server),
            programs: programs.to_owned(),
            node: node.name().to_owned(),
            network: format!("--net={}", node.netns().path().display()),
            kubeconfig: node.kubeconfig(),
            zds_socket: node.zds_socket(),
            dir: dir.to_owned(),
            process: None,
        }
    }

    /// Creates the objects of istio-cni, without the processes. The settings replace defaults of the chart; returns the
    /// manifest of the objects.
    pub fn deploy(&self, settings: &[(&str, &str)]) -> anyhow::Result<&'static str> {
        self.server.apply(OBJECTS)?;
        let config = format!("{NAMESPACE}/configmaps/istio-cni-config");
        let settings: BTreeMap<_, _> = settings.iter().copied().collect();
        self.server.patch(&config, &json!({"data": settings}))?;
        self.account()?;
        Ok(OBJECTS)
    }

    /// Starts the agent through the command line `within`, with a log level; returns once the agent is ready.
    pub fn start(&mut self, within: &[&str], log_level: &str) -> anyhow::Result<()> {
        self.execute(within, log_level)?;
        eventually("istio-cni is ready", START, || self.is_ready())
    }

    /// Deletes the DaemonSet like `kubectl delete daemonset --cascade=orphan` and the garbage collector.
    pub fn delete_daemonset(&self) -> anyhow::Result<()> {
        let orphan = json!({"propagationPolicy": "Orphan"});
        self.server.delete_with(DAEMONSET, &orphan)?;
        let orphaned = json!({"metadata": {"finalizers": null}});
        self.server.patch(DAEMONSET, &orphaned).map(drop)
    }

    /// Ends the agent like `kubectl delete pod`: by SIGTERM, then by SIGKILL after the grace period. Returns whether
    /// the agent ended by itself.
    pub fn delete_pod(&mut self) -> anyhow::Result<bool> {
        let mut process = self.process.take().context("it does not run")?;
        let pid = Pid::from_raw(i32::try_from(process.id())?);
        kill(pid, Signal::SIGTERM)?;
        let ended = eventually("istio-cni has ended", GRACE, || {
            let ended = process.try_wait().map_err(anyhow::Error::from)?;
            ended.context("it runs")
        });
        if ended.is_err() {
            process.kill()?;
            process.wait()?;
        }
        Ok(ended.is_ok())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Turns a call of the chain's other plugins into a call of Istio's plugin, with the keys of its entry in the
    /// chain.
    pub fn to_istio_call(&self, call: Call) -> anyhow::Result<Call> {
        let mut lists: Vec<Value> = Vec::new();
        for entry in fs::read_dir(self.dir.join("host/etc/cni/net.d"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "conflist") {
                lists.push(serde_json::from_slice(&fs::read(path)?)?);
            }
        }
        let plugins = lists
            .iter()
            .filter_map(|list| list.get("plugins")?.as_array());
        let plugin = plugins
            .flatten()
            .find(|plugin| plugin.get("type") == Some(&json!("istio-cni")));
        let entries = plugin.and_then(Value::as_object);
        let entries = entries.context("istio-cni is not in the chain")?.clone();
        Ok(entries
            .into_iter()
            .fold(call, |call, (key, value)| call.with_key(&key, value)))
    }

    /// Writes the files of the service account that the kubelet mounts in the pod.
    fn account(&self) -> anyhow::Result<()> {
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let path = format!("{NAMESPACE}/serviceaccounts/istio-cni/token");
        let answer = self.server.create(&path, &request)?;
        let token = answer.pointer("/status/token").and_then(Value::as_str);
        let account = self.dir.join("account");
        fs::create_dir_all(&account)?;
        fs::write(account.join("token"), token.context("no token")?)?;
        let kubeconfig: Value = serde_json::from_slice(&fs::read(&self.kubeconfig)?)?;
        let authority = kubeconfig.pointer("/clusters/0/cluster/certificate-authority");
        let authority = authority.and_then(Value::as_str).context("no authority")?;
        fs::copy(authority, account.join("ca.crt"))?;
        Ok(())
    }

    fn execute(&mut self, within: &[&str], log_level: &str) -> anyhow::Result<()> {
        let script = self.dir.join("agent.sh");
        fs::write(&script, include_str!("istio_cni/agent.sh"))?;
        fs::create_dir_all(self.dir.join("agent"))?;
        fs::create_dir_all(self.zds_socket.parent().context("a directory")?)?;
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))?;
        let mut command = Command::new("nsenter");
        command
            .arg(&self.network)
            .args(within)
            .args(["unshare", "--mount", "--propagation", "slave", "sh"])
            .arg(script)
            .arg(&self.dir)
            .arg(&self.programs)
            .arg("install-cni")
            .arg(format!("--log_output_level={log_level}"))
            .env_clear()
            .envs(self.environment()?)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.process = Some(command.spawn()?);
        Ok(())
    }

    /// Returns the environment of the agent: the ConfigMap, the additions of the DaemonSet, and the paths of this test.
    fn environment(&self) -> anyhow::Result<Vec<(String, String)>> {
        let path = format!("{NAMESPACE}/configmaps/istio-cni-config");
        let map = self.server.get(&path)?;
        let data = map
            .pointer("/data")
            .and_then(Value::as_object)
            .context("no data")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut all: Vec<_> = data
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect();
        let node = self.node.as_str();
        let zds = self.zds_socket.display().to_string();
        let run_dir = self.dir.join("agent").display().to_string();
        for (name, value) in [
            ("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("NODE_NAME", node),
            ("REPAIR_NODE_NAME", node),
            ("POD_NAME", "istio-cni-node-1"),
            ("POD_NAMESPACE", "istio-system"),
            ("KUBERNETES_SERVICE_HOST", self.server.address()),
            ("KUBERNETES_SERVICE_PORT", "6443"),
            ("ZTUNNEL_UDS_ADDRESS", &zds),
            ("CNI_AGENT_RUN_DIR", &run_dir),
            // pod-events uses Istio's default port here.
            ("MONITORING_PORT", "0"),
        ] {
            all.push((name.to_owned(), value.to_owned()));
        }
        Ok(all)
    }

    fn is_ready(&self) -> anyhow::Result<()> {
        let ask = [
            "curl",
            "-sf",
            "--max-time",
            "2",
            "http://127.0.0.1:8000/readyz",
        ];
        let answer = run("nsenter", &[&[self.network.as_str()][..], &ask].concat());
        ensure!(answer.is_ok(), "{}", self.log());
        Ok(())
    }
}

impl Drop for IstioCni {
    #[expect(
        clippy::print_stderr,
        reason = "what a failed test leaves behind for its reader"
    )]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- istio-cni\n{}", self.log());
        }
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap_or_default();
            process.wait().map(drop).unwrap_or_default();
        }
    }
}
