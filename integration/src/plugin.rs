use std::{
    ffi::OsStr,
    io::{self, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::{Pod, bin};

/// A call of the plugin exactly as containerd makes it, recorded from a real call.
#[derive(Clone, Debug)]
pub struct Call {
    pub environment: Vec<(String, String)>,
    pub stdin: String,
}

#[derive(Clone, Debug)]
pub struct Outcome {
    /// The exit code, or -1 if a signal ended the process.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Call {
    pub fn add(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::with_verb("ADD", pod, agent_socket, state_dir, true, true)
    }

    /// Returns the first DEL, which a runtime makes at StopPodSandbox.
    pub fn del(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::with_verb("DEL", pod, agent_socket, state_dir, true, true)
    }

    /// Returns the second DEL, which a runtime makes at RemovePodSandbox: without netns and result.
    pub fn del_again(pod: &Pod, agent_socket: &Path, state_dir: &Path) -> Self {
        Self::with_verb("DEL", pod, agent_socket, state_dir, false, false)
    }

    #[must_use]
    pub fn timeout_seconds(self, seconds: u64) -> Self {
        self.with_key("timeoutSeconds", seconds)
    }

    #[must_use]
    pub fn with_key(mut self, key: &str, value: impl Into<Value>) -> Self {
        let mut stdin: Value = serde_json::from_str(&self.stdin).unwrap_or_default();
        if let Some(stdin) = stdin.as_object_mut() {
            stdin.insert(key.to_owned(), value.into());
        }
        self.stdin = stdin.to_string();
        self
    }

    #[must_use]
    pub fn without_key(mut self, key: &str) -> Self {
        let mut stdin: Value = serde_json::from_str(&self.stdin).unwrap_or_default();
        if let Some(stdin) = stdin.as_object_mut() {
            stdin.remove(key);
        }
        self.stdin = stdin.to_string();
        self
    }

    #[must_use]
    pub fn with_var(mut self, name: &str, value: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    fn with_verb(
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

    pub fn run(&self) -> anyhow::Result<Outcome> {
        self.start()?.wait()
    }

    /// Runs the call with the plugin of another release.
    pub fn run_by(&self, plugin: &Path) -> anyhow::Result<Outcome> {
        self.start_by(plugin)?.wait()
    }

    pub fn start_by(&self, plugin: &Path) -> anyhow::Result<Running> {
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        Running::start_of(plugin, environment, self.stdin.as_bytes(), &[])
    }

    pub fn start(&self) -> anyhow::Result<Running> {
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        Running::start(environment, self.stdin.as_bytes(), &[])
    }
}

#[derive(Debug)]
pub struct Running {
    child: Child,
    started: Instant,
}

impl Running {
    /// Starts the plugin with exactly these variables, input and arguments.
    pub fn start<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        environment: impl IntoIterator<Item = (N, V)>,
        stdin: &[u8],
        arguments: &[&OsStr],
    ) -> anyhow::Result<Self> {
        Self::start_of(&bin("inpod-cni")?, environment, stdin, arguments)
    }

    fn start_of<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        plugin: &Path,
        environment: impl IntoIterator<Item = (N, V)>,
        stdin: &[u8],
        arguments: &[&OsStr],
    ) -> anyhow::Result<Self> {
        let started = Instant::now();
        let mut child = Command::new(plugin)
            .env_clear()
            .envs(environment)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot execute the plugin")?;
        let pipe = child.stdin.take();
        let written = pipe
            .context("the plugin has a standard input")?
            .write_all(stdin);
        match written {
            // The plugin may leave the input unread if it refuses the call.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).context("the plugin does not read")
            }
            Ok(()) | Err(_) => Ok(Self { child, started }),
        }
    }

    /// Kills the plugin, like a runtime after its time limit.
    pub fn kill(mut self) -> anyhow::Result<Outcome> {
        self.child.kill().context("cannot kill the plugin")?;
        self.wait()
    }

    pub fn wait(self) -> anyhow::Result<Outcome> {
        let output = self
            .child
            .wait_with_output()
            .context("the plugin is lost")?;
        Ok(Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            took: self.started.elapsed(),
        })
    }
}

/// Returns the result of the chain in the form of containerd 1.6, with bridge and host-local.
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
    pub fn error(&self) -> anyhow::Result<Value> {
        let error: Value = serde_json::from_str(&self.stdout)
            .with_context(|| format!("no JSON: {:?}", self.stdout))?;
        anyhow::ensure!(error.get("code").is_some(), "no error object: {error}");
        Ok(error)
    }

    /// Returns the code and the text of the error, `msg; details`, as a runtime shows errors. Fails unless the plugin
    /// exited with code 1 and an error object.
    pub fn refusal(&self) -> anyhow::Result<(u64, String)> {
        anyhow::ensure!(self.code == 1, "exit code {}: {self:?}", self.code);
        let error = self.error()?;
        let text = |key| error.get(key).and_then(Value::as_str).unwrap_or_default();
        let code = error.get("code").and_then(Value::as_u64);
        let words = format!("{}; {}", text("msg"), text("details"));
        Ok((code.context("the code is a number")?, words))
    }
}
