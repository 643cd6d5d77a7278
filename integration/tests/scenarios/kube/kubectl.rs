//! `deploy/kubectl-inpod` with a real kubectl and a real API server, on nodes in each state. There is no kubelet, so the
//! program that the script uses as kubectl answers `exec` itself: it runs the client with the node's sockets.

mod user_rights;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Output,
};

use integration::{bin, tool};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::cluster::Cluster;

/// Takes the pod's run directory from a file of the pod's name. A pod without the file never answers. Each
/// command line is added to a file.
const KUBECTL: &str = r#"#!/bin/sh
echo "$*" >>"$DIRECTORY/calls"
case " $* " in
  *" exec "*)
    while [ "$1" != exec ]; do shift; done
    run_dir=$(cat "$DIRECTORY/$2") || exec sleep 60
    while [ "$1" != /inpod ]; do shift; done
    shift
    exec "$CLIENT" --run-dir "$run_dir" "$@"
    ;;
esac
exec "$REAL_KUBECTL" "$@"
"#;

const SERVICES: [&str; 2] = ["pod-events", "netconfig"];

/// A node whose agent serves and has the pod `web` in the mesh, and the pods of further agents.
struct Agents {
    directory: TempDir,
    namespace: String,
    cluster: Cluster,
}

impl Agents {
    fn new() -> Self {
        let cluster = Cluster::shared();
        let namespace = format!("inpod-of-{}", cluster.node.name());
        cluster.make_namespace(&namespace, &json!({}));
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("kubectl");
        fs::write(&program, KUBECTL).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let agents = Self {
            directory,
            namespace,
            cluster,
        };
        agents.write_kubeconfig();
        let (node, cluster) = (&agents.cluster.node, &agents.cluster);
        let uid = cluster.create(&cluster.object("web", Some("ambient")));
        node.add(&cluster.sandbox("web", &uid)).unwrap();
        agents.pod(node.name(), &SERVICES.map(|name| (name, restarted())));
        agents.answers(node.name(), &node.run_dir());
        agents
    }

    /// Writes the configuration of a user who may read pods.
    fn write_kubeconfig(&self) {
        let make = |path: &str, object: Value| self.cluster.server.create(path, &object).unwrap();
        let (namespace, name) = (&self.namespace, &self.namespace);
        let account =
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        make(&accounts, account);
        let rule = json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]});
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let role = json!({"metadata": {"name": name}, "rules": [rule]});
        make(&format!("{rbac}/clusterroles"), role);
        let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
        let to =
            json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name});
        let binding = json!({"metadata": {"name": name}, "roleRef": to, "subjects": [subject]});
        make(&format!("{rbac}/clusterrolebindings"), binding);
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let token = make(&format!("{accounts}/{name}/token"), request);
        let config = fs::read(self.cluster.node.kubeconfig()).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        config["users"][0]["user"]["token"] = token["status"]["token"].clone();
        fs::write(self.kubeconfig(), config.to_string()).unwrap();
    }

    fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("kubeconfig")
    }

    /// Creates an agent's pod with the given states of its containers.
    fn pod(&self, node: &str, containers: &[(&str, Value)]) {
        let path = format!("/api/v1/namespaces/{}/pods", self.namespace);
        let name = format!("agent-{node}");
        let labels =
            json!({"app.kubernetes.io/part-of": "inpod", "app.kubernetes.io/name": "inpod"});
        let specs: Vec<_> = containers
            .iter()
            .map(|(name, _)| json!({"name": name, "image": "x"}))
            .collect();
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": node, "containers": specs},
        });
        self.cluster.server.create(&path, &pod).unwrap();
        let statuses: Vec<_> = containers
            .iter()
            .map(|(name, status)| {
                let mut all = json!({"name": name, "image": "x", "imageID": "", "ready": false, "restartCount": 0});
                all.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
                all
            })
            .collect();
        let status = json!({"status": {"containerStatuses": statuses}});
        let path = format!("{path}/{name}/status");
        self.cluster.server.patch(&path, &status).unwrap();
    }

    /// Lets the client in the node's pod reach the services of a run directory.
    fn answers(&self, node: &str, run_dir: &Path) {
        let file = self.directory.path().join(format!("agent-{node}"));
        fs::write(file, run_dir.display().to_string()).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubectl-inpod");
        let mut command = self.cluster.server.beside(Path::new(script));
        command
            .args(arguments)
            .args(["--inpod-namespace", &self.namespace])
            .env("DIRECTORY", self.directory.path())
            .env("CLIENT", bin("inpod").unwrap())
            .env("KUBECTL", self.directory.path().join("kubectl"))
            .env("REAL_KUBECTL", tool("KUBECTL").unwrap())
            .env("KUBECONFIG", self.kubeconfig());
        command.output().unwrap()
    }
}

fn running() -> Value {
    json!({"state": {"running": {}}})
}

fn restarted() -> Value {
    let message = "an earlier log\n".repeat(100);
    json!({
        "state": {"running": {}},
        "lastState": {"terminated": {"exitCode": 255, "reason": "Unknown", "message": message}},
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn kubectl_inpod_asks_every_node_and_names_what_does_not_run() {
    let agents = Agents::new();
    // A dead agent, one whose netconfig cannot start, and one that never answers.
    let dead = json!({
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "cannot open\nthe checkpoint"}},
    });
    agents.pod(
        "node-dead",
        &[("pod-events", dead), ("netconfig", running())],
    );
    // A kubelet that forges a line.
    let forged = "Error\nx;id\tp\tinpod\tpod-events\trunning";
    let old = json!({"state": {"terminated": {"exitCode": 1, "reason": forged, "message": "Linux 5.10 is too old"}}});
    let log = format!("{}the checkpoint is full", "an earlier line\n".repeat(100));
    let logs = json!({"state": {"terminated": {"exitCode": 1, "reason": "Error", "message": log}}});
    agents.pod("node-logs", &[("pod-events", logs)]);
    agents.pod("node-old", &[("pod-events", running()), ("netconfig", old)]);
    let other = Cluster::shared();
    other.node.stop("netconfig", Signal::SIGKILL).unwrap();
    agents.answers("node-old", &other.node.run_dir());
    agents.pod("node-silent", &SERVICES.map(|name| (name, running())));

    let pods = agents.run(&["pods", "--timeout", "21"]);
    let (printed, errors) = (text(&pods.stdout), text(&pods.stderr));
    assert_eq!(pods.status.code(), Some(5), "{printed}{errors}");
    assert!(printed.starts_with("NODE "), "{printed}");
    assert_eq!(printed.matches("NAMESPACE").count(), 1, "{printed}");
    let row = printed.lines().find(|line| line.contains(" web ")).unwrap();
    let well = agents.cluster.node.name();
    assert!(
        row.starts_with(well) && row.contains("enrolled"),
        "{printed}"
    );
    for named in [
        "node-dead: the container pod-events of agent-node-dead does not run: waiting \"CrashLoopBackOff\": \"back-off 40s\"; before: \"Error\", exit code 1: \"cannot open\\nthe checkpoint\"",
        "node-dead: no answer, because pod-events does not run",
        "node-old: the container netconfig of agent-node-old does not run: terminated \"Error\\nx;id\\tp\\tinpod\\tpod-events\\trunning\", exit code 1: \"Linux 5.10 is too old\"",
        "node-silent: no answer within 21 s",
    ] {
        assert!(errors.contains(named), "{named}: {errors}");
    }
    let of_logs = |line: &&str| line.starts_with("node-logs: the container pod-events ");
    let line = errors.lines().find(of_logs).unwrap();
    assert!(
        line.contains("terminated \"Error\", exit code 1: "),
        "{line}"
    );
    assert!(line.ends_with("the checkpoint is full\""), "{line}");
    assert!(line.len() < 600, "{line}");
    assert!(
        !errors.contains(&format!("agent-{well} does not run")),
        "{errors}"
    );

    let doctor = text(&agents.run(&["doctor", "--node", "node-old"]).stdout);
    let is_silent = |line: &str| line.contains("SERVICE_SILENT (netconfig)");
    assert!(doctor.lines().any(is_silent), "{doctor}");
    assert!(!doctor.contains("CHAIN_"), "{doctor}");
}

#[test]
fn kubectl_inpod_passes_on_the_clients_formats_and_bundles() {
    let agents = Agents::new();
    let cluster = &agents.cluster;
    let succeeded = |arguments: &[&str]| {
        let output = agents.run(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {errors}");
        text(&output.stdout)
    };
    let (well, shop) = (cluster.node.name(), &cluster.namespace);
    let json = succeeded(&["pods", "-o", "json", "-n", shop]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json[well]["pods"][0]["pod"]["name"], "web", "{json}");
    let yaml = succeeded(&["pods", "-o", "yaml", "-n", shop]);
    assert!(yaml.starts_with(&format!("{well}:\n  pods:\n")), "{yaml}");
    let wide = succeeded(&["pods", "-o", "wide", "-n", shop]);
    assert!(
        wide.lines().next().unwrap().ends_with("CONTAINER"),
        "{wide}"
    );
    let explained = succeeded(&["explain", &format!("{shop}/web")]);
    assert!(explained.contains("State       enrolled"), "{explained}");

    let directory = tempfile::tempdir().unwrap();
    succeeded(&[
        "bundle",
        "--output",
        &directory.path().display().to_string(),
    ]);
    let archive = fs::read(directory.path().join(format!("inpod-{well}.tar"))).unwrap();
    assert_eq!(archive.get(257..262), Some(&b"ustar"[..]));
}
