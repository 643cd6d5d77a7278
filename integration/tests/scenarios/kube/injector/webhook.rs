//! The injector beside an API server.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use integration::{ApiServer, bin, eventually, run};
use serde_json::{Value, json};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

static NEXT: AtomicU16 = AtomicU16::new(0);

#[derive(Debug)]
pub(crate) struct Webhook {
    pub(crate) server: Arc<ApiServer>,
    pub(crate) dir: tempfile::TempDir,
    name: &'static str,
    port: u16,
    child: Option<Child>,
    registered: std::sync::Mutex<Vec<String>>,
}

/// The service account is set as its admission, missing here, would do.
pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"serviceAccountName": "default", "containers": [{"name": "app", "image": "app", "ports": [{"containerPort": 80}], "readinessProbe": {"httpGet": {"port": 80}}}]},
    })
}

/// Creates an authority and its first certificate.
fn authority(dir: &Path) {
    let script = "cd \"$0\" && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.crt -subj /CN=ca -days 2";
    run("sh", &["-ec", script, dir.to_str().unwrap()]).unwrap();
}

impl Webhook {
    pub(crate) fn start(name: &'static str) -> Self {
        let dir = tempfile::tempdir_in("/run").unwrap();
        authority(dir.path());
        let mut webhook = Self {
            server: ApiServer::shared().unwrap(),
            dir,
            name,
            port: 15100 + 2 * NEXT.fetch_add(1, Ordering::Relaxed),
            child: None,
            registered: std::sync::Mutex::default(),
        };
        webhook.rotate(1, 2);
        webhook.configure("");
        webhook.run();
        webhook
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Rotates like the kubelet: its own directory and one rename of a link. `days` is the validity.
    pub(crate) fn rotate(&self, number: u32, days: u32) {
        let address = self.server.address();
        let script = format!(
            "cd \"$0\" && mkdir -p tls/..v{number} && cd tls/..v{number}
             openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout tls.key -out csr -subj /CN=injector
             echo subjectAltName=IP:{address} >names
             openssl x509 -req -in csr -CA ../../ca.crt -CAkey ../../ca.key -set_serial {number} -days {days} -out tls.crt -extfile names"
        );
        run("sh", &["-ec", &script, self.dir.path().to_str().unwrap()]).unwrap();
        let tls = self.path("tls");
        symlink(format!("..v{number}"), tls.join("..new")).unwrap();
        fs::rename(tls.join("..new"), tls.join("..data")).unwrap();
        for file in ["tls.crt", "tls.key"] {
            let link = tls.join(file);
            if fs::symlink_metadata(&link).is_err() {
                symlink(format!("..data/{file}"), link).unwrap();
            }
        }
    }

    pub(crate) fn configure(&self, text: &str) {
        fs::write(self.path("new.yaml"), text).unwrap();
        fs::rename(self.path("new.yaml"), self.path("inject.yaml")).unwrap();
    }

    pub(crate) fn run(&mut self) {
        let mut command = self.server.beside(&bin("injector").unwrap());
        let address = self.server.address();
        command.args([
            "--peer",
            "uid",
            "--log-level",
            "debug",
            "--deadline-seconds",
            "60",
        ]);
        command.arg("--run-dir").arg(self.path("run"));
        command.arg("--tls-dir").arg(self.path("tls"));
        command.arg("--config-file").arg(self.path("inject.yaml"));
        command.args(["--listen-address", &format!("{address}:{}", self.port)]);
        command.args(["--metrics-address", &format!("{address}:{}", self.port + 1)]);
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        command
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        let ready = eventually("the injector is ready", TIMEOUT, || {
            ensure!(
                self.metrics()?.contains("inpod_injector_ready 1"),
                "not ready"
            );
            anyhow::Ok(())
        });
        ready
            .with_context(|| fs::read_to_string(self.path("log")).unwrap_or_default())
            .unwrap();
    }

    pub(crate) fn stop(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn curl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.server.beside(Path::new("curl"));
        command
            .args(["--silent", "--show-error", "--max-time", "60", "--cacert"])
            .arg(self.path("ca.crt"));
        let output = command.args(arguments).output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://{}:{}{path}", self.server.address(), self.port)
    }

    pub(crate) fn metrics(&self) -> anyhow::Result<String> {
        let url = format!("http://{}:{}/metrics", self.server.address(), self.port + 1);
        self.curl(&["--fail", &url])
    }

    pub(crate) fn counted(&self, outcome: &str) -> u64 {
        let text = self.metrics().unwrap();
        let start = format!("inpod_injector_reviews_total{{outcome=\"{outcome}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |number| number.parse().unwrap())
    }

    fn metric(&self, name: &str) -> u64 {
        let text = self.metrics().unwrap();
        let start = format!("inpod_injector_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |number| number.parse().unwrap())
    }

    /// Returns the largest resident memory so far, in KiB.
    pub(crate) fn peak_memory(&self) -> u64 {
        let pid = self.child.as_ref().unwrap().id();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.unwrap().split_whitespace().next().unwrap();
        number.parse().unwrap()
    }

    pub(crate) fn evictions(&self) -> u64 {
        self.metric("evictions_total")
    }

    pub(crate) fn expiration(&self) -> u64 {
        self.metric("certificate_expiration_timestamp_seconds")
    }

    /// Returns the certificate file's end of validity, according to openssl.
    pub(crate) fn written_expiration(&self) -> u64 {
        let script = "date -d \"$(openssl x509 -in \"$0\" -noout -enddate | cut -d= -f2)\" +%s";
        let file = self.path("tls/tls.crt");
        let text = run("sh", &["-ec", script, file.to_str().unwrap()]).unwrap();
        text.trim().parse().unwrap()
    }

    /// Returns each review's outcome and number of patch operations, from the injector's log.
    pub(crate) fn reviews(&self) -> Vec<(String, u64)> {
        let log = fs::read_to_string(self.path("log")).unwrap();
        // The last line can be incomplete.
        let lines = log.split_inclusive('\n').filter(|it| it.ends_with('\n'));
        let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
        let reviewed = lines.filter(|line| line["message"] == "Reviewed");
        let reported = |it: Value| {
            let outcome = it["outcome"].as_str().unwrap().to_owned();
            (outcome, it["operations"].as_u64().unwrap())
        };
        reviewed.map(reported).collect()
    }

    pub(crate) fn until_reloaded(&self, what: &str, result: &str) {
        eventually("the change is seen", TIMEOUT, || {
            let text = self.metrics()?;
            let is_meant = |line: &&str| {
                line.contains(&format!("what=\"{what}\""))
                    && line.contains(&format!("result=\"{result}\""))
            };
            ensure!(text.lines().any(|line| is_meant(&line)), "not yet");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn namespace(&self, name: &str, label: Option<(&str, &str)>) -> String {
        let name = format!("inject-{}-{name}", self.name);
        let mut labels = json!({"test": self.name});
        if let Some((key, value)) = label {
            labels[key] = value.into();
        }
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        self.server.create("/api/v1/namespaces", &object).unwrap();
        name
    }

    /// Returns a webhook for pods of this test's namespaces that ask for injection.
    pub(crate) fn hook(&self, name: &str, path: &str, policy: &str) -> Value {
        let bundle = run(
            "openssl",
            &["base64", "-A", "-in", self.path("ca.crt").to_str().unwrap()],
        )
        .unwrap();
        json!({
            "name": format!("{name}.injector.inpod.io"),
            "clientConfig": {"url": self.url(path), "caBundle": bundle.trim()},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": policy,
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "namespaceSelector": {"matchLabels": {"istio-injection": "enabled", "test": self.name}},
            "objectSelector": {"matchExpressions": [{"key": "sidecar.istio.io/inject", "operator": "NotIn", "values": ["false"]}]},
        })
    }

    pub(crate) fn register(&self, hooks: &Value) {
        self.register_as("only", hooks);
    }

    pub(crate) fn register_as(&self, name: &str, hooks: &Value) {
        let name = format!("injector-{}-{name}", self.name);
        let object = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": hooks,
        });
        let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
        self.server.create(path, &object).unwrap();
        self.registered
            .lock()
            .unwrap()
            .push(format!("{path}/{name}"));
    }

    pub(crate) fn make(&self, namespace: &str, pod: &Value) -> anyhow::Result<Value> {
        self.server
            .create(&format!("/api/v1/namespaces/{namespace}/pods"), pod)
    }

    pub(crate) fn dry_run(&self, namespace: &str, pod: &Value) -> anyhow::Result<Value> {
        self.server.create(
            &format!("/api/v1/namespaces/{namespace}/pods?dryRun=All"),
            pod,
        )
    }

    pub(crate) fn until_injected(&self, namespace: &str) {
        self.until(namespace, |made| {
            crate::kube::injector::containers(made).len() == 2
        });
    }

    /// Waits until a dry-run pod meets a condition.
    pub(crate) fn until(&self, namespace: &str, is_so: impl Fn(&Value) -> bool) {
        let found = eventually("pods are injected", TIMEOUT, || {
            let made = self.dry_run(namespace, &pod("probe"))?;
            ensure!(is_so(&made), "not yet");
            anyhow::Ok(())
        });
        found
            .with_context(|| fs::read_to_string(self.path("log")).unwrap_or_default())
            .unwrap();
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        for path in self.registered.lock().unwrap().iter() {
            self.server.delete(path).unwrap_or_default();
        }
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap_or_default();
            child.wait().map(drop).unwrap_or_default();
        }
    }
}
