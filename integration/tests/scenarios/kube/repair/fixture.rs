//! `repair`, its inputs, and means to observe it.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context as _, ensure};
use inpod_proto::{podevents::v1::PodState, types::v1::Enrollment};
use integration::{ApiServer, Node, TIMEOUT, eventually, run};
use serde_json::{Value, json};

use crate::kube::repair::fake::Fake;

static NEXT: AtomicU32 = AtomicU32::new(1);

/// Enabled actions determine the permissions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Repair,
    Label,
    Delete,
    Unknown,
}

pub(crate) const LABEL: &str = "/metadata/labels/cni.istio.io~1uninitialized";

fn manifest(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(format!("deploy/manifests/{name}.yaml"))).unwrap()
}

/// Deploys repair once for each action, under a name of its own. Returns that name, which is its account's, too.
pub(crate) fn deployed(server: &ApiServer, action: Action) -> &'static str {
    static DEPLOYED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let (name, over) = match action {
        Action::Repair => ("inpod-repair", None),
        Action::Label => ("inpod-repair-label", Some("repair-label")),
        Action::Delete => ("inpod-repair-delete", Some("repair-delete")),
        Action::Unknown => ("inpod-repair-unknown", Some("repair-unknown")),
    };
    let mut deployed = DEPLOYED.lock().unwrap_or_else(PoisonError::into_inner);
    if !deployed.contains(&name) {
        for manifest in ["repair"].into_iter().chain(over) {
            let renamed = self::manifest(manifest).replace("inpod-repair", name);
            server.apply(&renamed).unwrap();
        }
        deployed.push(name);
    }
    name
}

/// repair's identity on a node, a namespace, and scripted pod-events answers.
pub(crate) struct Fixture {
    pub(crate) server: Arc<ApiServer>,
    pub(crate) node: Node,
    pub(crate) namespace: String,
    kubeconfig: PathBuf,
    pub(crate) said: Fake,
    pub(crate) account: &'static str,
    action: Action,
}

impl Fixture {
    pub(crate) fn new(action: Action) -> Self {
        Self::beside(action, "kubeconfig", Fake::start)
    }

    /// The real pod-events and netconfig suffice for pods with a sidecar.
    pub(crate) fn real(action: Action) -> Self {
        let fixture = Self::beside(action, "kubeconfig-of-repair", |_| Fake::silent());
        fixture.node.start("netconfig").unwrap();
        fixture.node.start("pod-events").unwrap();
        fixture
    }

    pub(crate) fn beside(
        action: Action,
        kubeconfig: &str,
        said: impl FnOnce(&Path) -> Fake,
    ) -> Self {
        let server = ApiServer::shared().unwrap();
        let account = deployed(&server, action);
        let node = Node::of_cluster(&server).unwrap();
        let kubeconfig = node.kubeconfig().with_file_name(kubeconfig);
        let identity = server.kubeconfig_for(account, node.name());
        fs::write(&kubeconfig, identity.unwrap()).unwrap();
        let namespace = format!("repair-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        server.create("/api/v1/namespaces", &object).unwrap();
        let said = said(&node.run_dir());
        Self {
            server,
            node,
            namespace,
            kubeconfig,
            said,
            account,
            action,
        }
    }

    /// Starts it like the chart; `wait` is in seconds.
    pub(crate) fn start(&self, wait: u32, more: &[&str]) {
        let (label, delete) = (
            matches!(self.action, Action::Label),
            matches!(self.action, Action::Delete),
        );
        let kubeconfig = self.kubeconfig.display().to_string();
        let (wait, label, delete) = (wait.to_string(), label.to_string(), delete.to_string());
        let usual = [
            ["--peer", "uid"],
            ["--node-name", self.node.name()],
            ["--kubeconfig", &kubeconfig],
            ["--label-pods", &label],
            ["--delete-pods", &delete],
            ["--repair-wait-seconds", &wait],
        ];
        let is_usual = |pair: &&[&str; 2]| !more.contains(&pair[0]);
        let usual = usual.iter().filter(is_usual).flatten();
        let settings: Vec<_> = usual.chain(more).copied().collect();
        self.node.start_with("repair", &settings).unwrap();
        eventually("repair is ready", TIMEOUT, || {
            ensure!(self.counted("inpod_repair_ready") == 1, "not yet");
            let heard = self.counted("inpod_repair_condition{name=\"pod-events\"}");
            ensure!(heard == 1, "it does not hear pod-events");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    pub(crate) fn pod(&self, name: &str) -> anyhow::Result<Value> {
        self.server.get(&self.path(name))
    }

    pub(crate) fn make(&self, name: &str, labels: &Value) -> String {
        self.make_on(self.node.name(), name, labels)
    }

    pub(crate) fn make_on(&self, node: &str, name: &str, labels: &Value) -> String {
        let container = |name: &str| json!({"name": name, "image": "app"});
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels, "annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"nodeName": node, "initContainers": [container("istio-validation")], "containers": [container("app")]},
        });
        self.create(&pod)
    }

    pub(crate) fn create(&self, pod: &Value) -> String {
        let path = format!("/api/v1/namespaces/{}/pods", self.namespace);
        let made = self.server.create(&path, pod).unwrap();
        made.pointer("/metadata/uid")
            .and_then(Value::as_str)
            .unwrap()
            .to_owned()
    }

    /// Shows, like a kubelet, a container that failed in a run begun at a second of 1970 and waits for the next.
    pub(crate) fn fail(&self, name: &str, code: i32) {
        let failed = json!({"exitCode": code, "reason": "Error", "startedAt": "2026-01-01T00:01:40Z", "finishedAt": "2026-01-01T00:01:45Z"});
        self.show(
            name,
            &json!({"waiting": {"reason": "CrashLoopBackOff"}}),
            &json!({"terminated": failed}),
        );
    }

    /// Shows one that has passed, as a kubelet does.
    pub(crate) fn pass(&self, name: &str) {
        let done = json!({"exitCode": 0, "reason": "Completed"});
        self.show(
            name,
            &json!({"terminated": done}),
            &json!({"terminated": {"exitCode": 126, "reason": "Error"}}),
        );
    }

    pub(crate) fn show(&self, name: &str, state: &Value, last: &Value) {
        let status = json!({"name": "istio-validation", "image": "app", "imageID": "", "ready": false, "restartCount": 1, "state": state, "lastState": last});
        let change = json!({"status": {"phase": "Pending", "initContainerStatuses": [status]}});
        self.server
            .patch(&format!("{}/status", self.path(name)), &change)
            .unwrap();
    }

    /// Creates a failed pod that pod-events could not redirect.
    pub(crate) fn broken(&self, name: &str) -> String {
        let uid = self.make(name, &json!({}));
        self.said
            .report(&uid, Enrollment::Sidecar, PodState::Out, 0);
        self.fail(name, 126);
        uid
    }

    pub(crate) fn counted(&self, series: &str) -> u64 {
        let socket = inpod_service::socket(&self.node.run_dir(), "repair");
        let words = [
            "-sSf",
            "--unix-socket",
            socket.to_str().unwrap(),
            "http://localhost/metrics",
        ];
        let text = run("curl", &words).unwrap_or_default();
        let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
        text.lines().find_map(value).unwrap_or_default()
    }

    pub(crate) fn pods(&self, action: &str, result: &str) -> u64 {
        self.counted(&format!(
            "inpod_repair_pods_total{{type=\"{action}\",result=\"{result}\"}}"
        ))
    }

    pub(crate) fn until_counted(&self, action: &str, result: &str, wanted: u64) {
        eventually("it is counted", TIMEOUT, || {
            let found = self.pods(action, result);
            ensure!(found == wanted, "{action} {result}: {found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn event(&self, name: &str, reason: &str, kind: &str) -> String {
        eventually("the Event is there", TIMEOUT, || {
            let path = format!(
                "/apis/events.k8s.io/v1/namespaces/{}/events",
                self.namespace
            );
            let all = self.server.get(&path)?;
            let says = |event: &&Value, at: &str, wanted: &str| {
                event.pointer(at).and_then(Value::as_str) == Some(wanted)
            };
            let mut all = all
                .pointer("/items")
                .and_then(Value::as_array)
                .context("a list")?
                .iter();
            let found = all.find(|event| {
                says(event, "/regarding/name", name)
                    && says(event, "/reason", reason)
                    && says(event, "/type", kind)
            });
            let found = found.with_context(|| format!("no {kind} {reason} of {name}"))?;
            assert_eq!(found["reportingController"], "inpod.io/repair");
            assert_eq!(found["reportingInstance"], self.node.name());
            anyhow::Ok(found["note"].as_str().unwrap_or_default().to_owned())
        })
        .unwrap()
    }

    pub(crate) fn until_labelled(&self, name: &str, wanted: Option<&str>) {
        eventually("the pod bears the label", TIMEOUT, || {
            let pod = self.pod(name)?;
            let found = pod.pointer(LABEL).and_then(Value::as_str);
            ensure!(found == wanted, "{found:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn until_gone(&self, name: &str) {
        eventually("the pod is deleted", TIMEOUT, || match self.pod(name) {
            Err(_) => anyhow::Ok(()),
            Ok(pod) => {
                ensure!(
                    pod.pointer("/metadata/deletionTimestamp").is_some(),
                    "it is there"
                );
                Ok(())
            }
        })
        .unwrap();
    }

    pub(crate) fn is_there(&self, name: &str) -> bool {
        self.pod(name)
            .is_ok_and(|pod| pod.pointer("/metadata/deletionTimestamp").is_none())
    }
}
