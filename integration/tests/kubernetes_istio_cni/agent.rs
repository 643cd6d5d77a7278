//! A real istio-cni: its program, and its chart's ConfigMap and RBAC.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{eventually, run};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{AGENT_TIMEOUT, cluster::Cluster};

/// The value of the chart's `terminationGracePeriodSeconds`.
const GRACE: Duration = Duration::from_secs(30);

const NAMESPACE: &str = "/api/v1/namespaces/istio-system";
const DAEMONSET: &str = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node";

/// Returns what `need_istio_cni` of `integration/setup.sh` makes.
fn programs() -> anyhow::Result<PathBuf> {
    let dir = std::env::var_os("ISTIO_CNI").map(PathBuf::from);
    let found = dir.filter(|dir| dir.join("install-cni").is_file());
    found
        .context("ISTIO_CNI names no directory with install-cni: run ./integration/test kubernetes")
}

/// Renders Istio's chart with `NAME=VALUE` beside its profile `ambient`.
fn chart(values: &[&str]) -> anyhow::Result<String> {
    let helm = std::env::var_os("HELM").and_then(|path| path.into_string().ok());
    let helm = helm.context("HELM names no program: run ./integration/test kubernetes")?;
    let chart = programs()?.join("chart").display().to_string();
    let words = ["template", "istio-cni", &chart, "--namespace=istio-system"];
    let release = [
        &words[..],
        &["--kube-version=v1.34.0", "--set=profile=ambient"],
    ]
    .concat();
    let set: Vec<_> = values
        .iter()
        .map(|value| format!("--set={value}"))
        .collect();
    run(
        &helm,
        &[
            &release[..],
            &set.iter().map(String::as_str).collect::<Vec<_>>(),
        ]
        .concat(),
    )
}

pub(crate) struct IstioCni<'a> {
    cluster: &'a Cluster,
    dir: PathBuf,
    process: Option<Child>,
}

impl<'a> IstioCni<'a> {
    /// The directory contains the node's `host/`.
    pub(crate) fn new(cluster: &'a Cluster, dir: &Path) -> Self {
        let metadata = json!({"name": "istio-system"});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        cluster
            .server
            .create("/api/v1/namespaces", &object)
            .unwrap();
        Self {
            cluster,
            dir: dir.to_owned(),
            process: None,
        }
    }

    pub(crate) fn install(&mut self, values: &[&str]) {
        self.cluster.server.apply(&chart(values).unwrap()).unwrap();
        self.account().unwrap();
        self.start().unwrap();
        eventually("istio-cni is ready", AGENT_TIMEOUT, || self.is_ready()).unwrap();
    }

    /// Acts like `kubectl delete daemonset --cascade=orphan` and the garbage collector.
    pub(crate) fn delete_daemonset(&self) {
        let orphan = json!({"propagationPolicy": "Orphan"});
        self.cluster.server.delete_with(DAEMONSET, &orphan).unwrap();
        let orphaned = json!({"metadata": {"finalizers": null}});
        self.cluster.server.patch(DAEMONSET, &orphaned).unwrap();
    }

    /// Acts like `kubectl delete pod`: SIGTERM, then SIGKILL after the grace period. Returns whether
    /// it ended by itself.
    pub(crate) fn delete_pod(&mut self) -> bool {
        let mut process = self.process.take().unwrap();
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        let ended = eventually("istio-cni has ended", GRACE, || {
            let ended = process.try_wait().map_err(anyhow::Error::from)?;
            ended.context("it runs")
        });
        if ended.is_err() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        ended.is_ok()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Mounted as the kubelet does in the pod.
    fn account(&self) -> anyhow::Result<()> {
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let path = format!("{NAMESPACE}/serviceaccounts/istio-cni/token");
        let answer = self.cluster.server.create(&path, &request)?;
        let token = answer.pointer("/status/token").and_then(Value::as_str);
        let account = self.dir.join("account");
        fs::create_dir_all(&account)?;
        fs::write(account.join("token"), token.context("no token")?)?;
        let kubeconfig: Value = serde_json::from_slice(&fs::read(self.cluster.node.kubeconfig())?)?;
        let authority = kubeconfig.pointer("/clusters/0/cluster/certificate-authority");
        let authority = authority.and_then(Value::as_str).context("no authority")?;
        fs::copy(authority, account.join("ca.crt"))?;
        Ok(())
    }

    fn start(&mut self) -> anyhow::Result<()> {
        let script = self.dir.join("agent.sh");
        fs::write(&script, include_str!("agent.sh"))?;
        fs::create_dir_all(self.dir.join("agent"))?;
        fs::create_dir_all(
            self.cluster
                .node
                .zds_socket()
                .parent()
                .context("a directory")?,
        )?;
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))?;
        let mut command = Command::new("nsenter");
        let net = format!("--net={}", self.cluster.node.netns().path().display());
        command
            .arg(net)
            .args(["unshare", "--mount", "--propagation", "slave", "sh"])
            .arg(script)
            .arg(&self.dir)
            .arg(programs()?)
            .args(["install-cni", "--log_output_level=all:debug"])
            .env_clear()
            .envs(self.environment()?)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.process = Some(command.spawn()?);
        Ok(())
    }

    /// Returns the chart's ConfigMap, the DaemonSet's additions, and this test's paths.
    fn environment(&self) -> anyhow::Result<Vec<(String, String)>> {
        let path = format!("{NAMESPACE}/configmaps/istio-cni-config");
        let map = self.cluster.server.get(&path)?;
        let data = map
            .pointer("/data")
            .and_then(Value::as_object)
            .context("no data")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut all: Vec<_> = data
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect();
        let node = self.cluster.node.name();
        let zds = self.cluster.node.zds_socket().display().to_string();
        let run_dir = self.dir.join("agent").display().to_string();
        for (name, value) in [
            ("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("NODE_NAME", node),
            ("REPAIR_NODE_NAME", node),
            ("POD_NAME", "istio-cni-node-1"),
            ("POD_NAMESPACE", "istio-system"),
            ("KUBERNETES_SERVICE_HOST", self.cluster.server.address()),
            ("KUBERNETES_SERVICE_PORT", "6443"),
            ("ZTUNNEL_UDS_ADDRESS", &zds),
            ("CNI_AGENT_RUN_DIR", &run_dir),
            // pod-events uses that port here.
            ("MONITORING_PORT", "0"),
        ] {
            all.push((name.to_owned(), value.to_owned()));
        }
        Ok(all)
    }

    fn is_ready(&self) -> anyhow::Result<()> {
        let net = format!("--net={}", self.cluster.node.netns().path().display());
        let ask = [
            "curl",
            "-sf",
            "--max-time",
            "2",
            "http://127.0.0.1:8000/readyz",
        ];
        let answer = run("nsenter", &[&[net.as_str()][..], &ask].concat());
        ensure!(answer.is_ok(), "{}", self.log());
        Ok(())
    }
}

impl Drop for IstioCni<'_> {
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
