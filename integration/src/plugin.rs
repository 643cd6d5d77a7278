use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::{Pod, bin};

/// One call of the plugin, exactly as containerd makes it (shared in form with what was recorded from a real one).
#[derive(Clone, Debug)]
pub struct Call {
    /// Environment.
    pub environment: Vec<(String, String)>,
    /// Standard input.
    pub stdin: String,
}

/// What the plugin answered.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its exit code.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// From exec to exit.
    pub took: Duration,
}

impl Call {
    /// ADD of a sandbox.
    pub fn add(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::verb("ADD", pod, agent_socket, state_dir, true, true)
    }

    /// The first DEL, at StopPodSandbox.
    pub fn del(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::verb("DEL", pod, agent_socket, state_dir, true, true)
    }

    /// The second DEL, at RemovePodSandbox: no netns, no result.
    pub fn del_again(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::verb("DEL", pod, agent_socket, state_dir, false, false)
    }

    /// The same call with another time limit.
    #[must_use]
    pub fn timeout_seconds(mut self, seconds: u64) -> Self {
        let mut stdin: Value = serde_json::from_str(&self.stdin).unwrap_or_default();
        if let Some(stdin) = stdin.as_object_mut() {
            stdin.insert("timeoutSeconds".to_owned(), seconds.into());
        }
        self.stdin = stdin.to_string();
        self
    }

    fn verb(
        verb: &str,
        pod: &Pod,
        agent_socket: &Path,
        state_dir: &Path,
        netns: bool,
        result: bool,
    ) -> Self {
        let path = pod.path().display().to_string();
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
            pod.spec.namespace, pod.spec.name, pod.container_id, pod.spec.uid
        );
        let environment = [
            ("CNI_ARGS", arguments.as_str()),
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", &pod.container_id),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", if netns { &path } else { "" }),
            ("CNI_PATH", "/opt/cni/bin"),
            ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        ];
        let mut stdin = json!({
            "capabilities": {"portMappings": true},
            "cniVersion": "1.0.0",
            "name": "podnet",
            "type": "inpod-cni",
            "agentSocket": agent_socket,
            "stateDir": state_dir,
            "runtimeConfig": {},
        });
        if let (true, Some(stdin)) = (result, stdin.as_object_mut()) {
            stdin.insert("prevResult".to_owned(), prev_result(pod, &path));
        }
        Self {
            environment: environment
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            stdin: stdin.to_string(),
        }
    }

    /// Executes the plugin.
    ///
    /// # Errors
    ///
    /// When it cannot be executed.
    pub fn run(&self) -> anyhow::Result<Outcome> {
        let started = Instant::now();
        let mut child = Command::new(bin("inpod-cni")?)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot execute the plugin")?;
        let stdin = child
            .stdin
            .take()
            .context("the plugin has a standard input")?;
        { stdin }
            .write_all(self.stdin.as_bytes())
            .context("the plugin does not read")?;
        let output = child.wait_with_output().context("the plugin is lost")?;
        Ok(Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            took: started.elapsed(),
        })
    }
}

/// The result of the chain so far, in the form of containerd 1.6 with bridge and host-local.
fn prev_result(pod: &Pod, path: &str) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "dns": {},
        "interfaces": [
            {"mac": "1a:ef:1b:83:cb:f7", "name": "cni0"},
            {"mac": "3a:a4:c5:5a:f2:9f", "name": pod.veth},
            {"mac": "ba:83:1b:9d:00:61", "name": "eth0", "sandbox": path},
        ],
        "ips": [
            {"address": format!("{}/16", pod.v4), "gateway": "10.77.0.1", "interface": 2},
            {"address": format!("{}/64", pod.v6), "gateway": "fd77::1", "interface": 2},
        ],
        "routes": [{"dst": "0.0.0.0/0"}],
    })
}

impl Outcome {
    /// The error object on standard output.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn error(&self) -> anyhow::Result<Value> {
        let error: Value = serde_json::from_str(&self.stdout)
            .with_context(|| format!("no JSON: {:?}", self.stdout))?;
        anyhow::ensure!(error.get("code").is_some(), "no error object: {error}");
        Ok(error)
    }
}
