//! A real API server with its etcd, in a network namespace to which nodes can connect.

mod apply;
mod batch;
mod beside;
mod chart;
pub(crate) mod process;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use inpod_linux::Netns;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    eventually, guard,
    pod::{exec_in, make_netns},
    process::succeeded,
    run,
};
pub use process::tool;
use process::{enter, etcd, spawn};

/// The time for a start, also on a busy machine.
const START: Duration = Duration::from_secs(120);

/// The audit policy, which logs every change requested by pod-events once the change is answered.
const AUDIT: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Request
  users: ["system:serviceaccount:inpod-system:pod-events"]
  verbs: [create, patch, update, delete]
- level: None
"#;

/// Each line has token, user, UID and groups; the kubelets of [`crate::kubernetes::NodeConfig`] have a line each.
const TOKENS: &str = "\
admin,admin,admin,system:masters
kube-proxy,system:kube-proxy,kube-proxy
node-1,system:node:node-1,node-1,system:nodes
node-2,system:node:node-2,node-2,system:nodes
node-3,system:node:node-3,node-3,system:nodes
node-4,system:node:node-4,node-4,system:nodes
node-5,system:node:node-5,node-5,system:nodes
node-6,system:node:node-6,node-6,system:nodes
";

/// The address of the server; the addresses of the nodes follow. Each is in fd78::/64, too, with the same last part.
const ADDRESS: &str = "10.78.0.1";

/// A locally administered address for the server's end of the link.
const MAC: &str = "02:00:0a:4e:00:01";

static NEXT: AtomicU32 = AtomicU32::new(1);
static SHARED: Mutex<Option<Arc<ApiServer>>> = Mutex::new(None);

/// An API server with RBAC and its own etcd, which knows the identity of pod-events.
#[derive(Debug)]
pub struct ApiServer {
    name: String,
    dir: PathBuf,
    netns: Netns,
    etcd: Mutex<Child>,
    server: Mutex<Option<Child>>,
    next_address: AtomicU32,
    settings: &'static [&'static str],
}

impl ApiServer {
    pub fn start() -> anyhow::Result<Self> {
        // Pods of tests may name service accounts that do not exist.
        let server = Self::start_with(&["--disable-admission-plugins=ServiceAccount"])?;
        server.deploy()?;
        Ok(server)
    }

    /// Starts a server with additional flags, without deploying anything.
    pub(crate) fn start_with(settings: &'static [&'static str]) -> anyhow::Result<Self> {
        guard()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("api-{}-{number}", std::process::id());
        let dir = PathBuf::from("/run").join(&name);
        fs::create_dir_all(dir.join("certs"))?;
        fs::write(dir.join("tokens.csv"), TOKENS)?;
        fs::write(dir.join("audit.yaml"), AUDIT)?;
        let key = dir.join("sa.key");
        run(
            "openssl",
            &[
                "genrsa".as_ref(),
                "-out".as_ref(),
                key.as_os_str(),
                "2048".as_ref(),
            ],
        )?;
        let netns = make_netns(&name)?;
        for command in [
            // Without a MAC address of its own, the bridge has the lowest address of its ports: a node that comes or
            // goes would change the address, and the other nodes would send to the old address until the next ARP
            // request.
            &[
                "ip", "link", "add", "api0", "address", MAC, "type", "bridge",
            ][..],
            &["ip", "addr", "add", "10.78.0.1/16", "dev", "api0"],
            &["ip", "addr", "add", "fd78::1/64", "dev", "api0", "nodad"],
            &["ip", "link", "set", "api0", "up"],
        ] {
            exec_in(netns.path(), command)?;
        }
        let etcd = etcd(&dir, &netns)?;
        let server = Self {
            name,
            dir,
            netns,
            etcd: Mutex::new(etcd),
            server: Mutex::default(),
            next_address: AtomicU32::new(2),
            settings,
        };
        server.run()?;
        Ok(server)
    }

    /// Returns the server that all tests of this process share. No test may stop the server or take rights from it;
    /// with an [`crate::ApiProxy`] in between, the server can seem to be away or to refuse. The server runs until the
    /// pid namespace of the tests ends.
    pub fn shared() -> anyhow::Result<Arc<Self>> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = shared.as_ref() {
            return Ok(Arc::clone(server));
        }
        let server = Arc::new(Self::start()?);
        *shared = Some(Arc::clone(&server));
        Ok(server)
    }

    /// Runs the server, whose etcd must be running already.
    pub fn run(&self) -> anyhow::Result<()> {
        let file = |name: &str| self.dir.join(name).display().to_string();
        let arguments = [
            "--etcd-servers=http://127.0.0.1:2379".to_owned(),
            format!("--bind-address={ADDRESS}"),
            format!("--advertise-address={ADDRESS}"),
            "--secure-port=6443".to_owned(),
            "--service-cluster-ip-range=10.79.0.0/24,fd79::/112".to_owned(),
            format!("--cert-dir={}", file("certs")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", file("sa.key")),
            format!("--service-account-signing-key-file={}", file("sa.key")),
            format!("--audit-policy-file={}", file("audit.yaml")),
            format!("--audit-log-path={}", file("audit.log")),
        ];
        let mut command = enter(&self.netns, &tool("KUBE_APISERVER")?);
        command.args(arguments).args(self.settings);
        let child = spawn(command, &self.dir.join("apiserver.log"))?;
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        eventually("the API server serves", START, || {
            self.curl("GET", "/readyz", "text/plain", None)
        })
        .map(drop)
        .with_context(|| self.tail())
    }

    pub fn signal(&self, number: Signal) -> anyhow::Result<()> {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let id = server.as_ref().context("the API server does not run")?.id();
        Ok(kill(Pid::from_raw(i32::try_from(id)?), number)?)
    }

    /// Kills only the server, so that its etcd continues.
    pub fn kill(&self) -> anyhow::Result<()> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = server.take().context("the API server does not run")?;
        child.kill()?;
        Ok(child.wait().map(drop)?)
    }

    fn tail(&self) -> String {
        let text = fs::read_to_string(self.dir.join("apiserver.log")).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(20)..);
        tail.unwrap_or_default().join("\n")
    }

    /// Connects a node to the server's network, with the next free address.
    pub fn plug(&self, node: &Netns) -> anyhow::Result<()> {
        self.plug_at(node, self.next_address.fetch_add(1, Ordering::Relaxed))
    }

    /// Connects a node with the address of this number.
    pub(crate) fn plug_at(&self, node: &Netns, number: u32) -> anyhow::Result<()> {
        let (here, address) = (format!("api{number}"), format!("10.78.0.{number}/16"));
        let there = node.path().display().to_string();
        let link = [
            "ip", "link", "add", &here, "type", "veth", "peer", "name", "api0",
        ];
        let name = there.rsplit('/').next().unwrap_or_default();
        exec_in(self.netns.path(), &[&link[..], &["netns", name]].concat())?;
        exec_in(
            self.netns.path(),
            &["ip", "link", "set", &here, "master", "api0", "up"],
        )?;
        exec_in(node.path(), &["ip", "addr", "add", &address, "dev", "api0"])?;
        let address = format!("fd78::{number}/64");
        let address = ["addr", "add", &address, "dev", "api0", "nodad"];
        exec_in(node.path(), &[&["ip"][..], &address].concat())?;
        exec_in(node.path(), &["ip", "link", "set", "api0", "up"]).map(drop)
    }

    /// Returns the changes by pod-events in a namespace, in order, from the audit log.
    pub fn changes_in(&self, namespace: &str) -> anyhow::Result<Vec<Value>> {
        let log = fs::read_to_string(self.dir.join("audit.log"))?;
        // The server may still be writing the last line.
        let lines = log.split_inclusive('\n').filter(|it| it.ends_with('\n'));
        // The lines of other tests need not be parsed.
        let lines = lines.filter(|it| it.contains(namespace));
        let all = lines.map(serde_json::from_str::<Value>);
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let is_meant = |change: &Value| {
            change
                .pointer("/objectRef/namespace")
                .and_then(Value::as_str)
                == Some(namespace)
        };
        Ok(all.into_iter().filter(is_meant).collect())
    }

    pub fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.curl("GET", path, "application/json", None)
    }

    pub fn create(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        self.curl("POST", path, "application/json", Some(&object.to_string()))
    }

    pub fn patch(&self, path: &str, change: &Value) -> anyhow::Result<Value> {
        let change = change.to_string();
        self.curl("PATCH", path, "application/merge-patch+json", Some(&change))
    }

    pub fn ask_as(
        &self,
        token: &str,
        (method, content): (&str, &str),
        path: &str,
        object: &Value,
    ) -> anyhow::Result<Value> {
        self.curl_as(token, (method, content), path, Some(&object.to_string()))
    }

    /// Deletes an object without a grace period.
    pub fn delete(&self, path: &str) -> anyhow::Result<()> {
        let now = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0});
        self.curl("DELETE", path, "application/json", Some(&now.to_string()))
            .map(drop)
    }

    fn curl(
        &self,
        method: &str,
        path: &str,
        content: &str,
        body: Option<&str>,
    ) -> anyhow::Result<Value> {
        self.curl_as("admin", (method, content), path, body)
    }

    fn curl_as(
        &self,
        token: &str,
        (method, content): (&str, &str),
        path: &str,
        body: Option<&str>,
    ) -> anyhow::Result<Value> {
        let mut command = enter(&self.netns, Path::new("curl"));
        command.args([
            "--silent",
            "--show-error",
            "--fail-with-body",
            "--max-time",
            "20",
        ]);
        command
            .arg("--cacert")
            .arg(self.dir.join("certs/apiserver.crt"));
        command.args([
            "-X",
            method,
            "-H",
            &format!("Authorization: Bearer {token}"),
        ]);
        command.args(["-H", &format!("Content-Type: {content}")]);
        if body.is_some() {
            command.args(["--data-binary", "@-"]);
        }
        command.arg(format!("https://{ADDRESS}:6443{path}"));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .context("cannot run curl; is it installed?")?;
        let stdin = child.stdin.take().context("curl has a standard input")?;
        { stdin }.write_all(body.unwrap_or_default().as_bytes())?;
        let text = succeeded("curl", &child.wait_with_output()?)?;
        Ok(serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let mut etcd = self.etcd.lock().unwrap_or_else(PoisonError::into_inner);
        for child in server.iter_mut().chain([&mut *etcd]) {
            // The kill fails if the process has ended already.
            child.kill().unwrap_or_default();
            child.wait().map(drop).unwrap_or_default();
        }
        run("ip", &["netns", "del", &self.name])
            .map(drop)
            .unwrap_or_default();
        fs::remove_dir_all(&self.dir).unwrap_or_default();
    }
}
