//! `inpod uninstall` and `inpod handover` with exactly their documented permissions at a real API server. The test
//! plays the kubelet: Ready nodes and containers' termination messages.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use anyhow::ensure;
use integration::{ApiServer, Node, TIMEOUT, bin, eventually};
use serde_json::{Value, json};

static NEXT: AtomicU32 = AtomicU32::new(1);

/// inpod in its own namespace, and a user who may uninstall it.
struct Cluster {
    server: Arc<ApiServer>,
    /// The user and its roles have the same name.
    namespace: String,
    place: Node,
    kubeconfig: PathBuf,
}

impl Cluster {
    fn new() -> Self {
        let server = ApiServer::shared().unwrap();
        let namespace = format!("leave-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let place = Node::of_cluster(&server).unwrap();
        let make = |path: &str, object: Value| server.create(path, &object).unwrap();
        make(
            "/api/v1/namespaces",
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
        );
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        make(
            &accounts,
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": namespace}}),
        );
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let version = "rbac.authorization.k8s.io/v1";
        let who = json!([{"kind": "ServiceAccount", "name": namespace, "namespace": namespace}]);
        let named = json!({"name": namespace});
        let nodes = json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]);
        let own = json!([
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
            {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["inpod-leave"], "verbs": ["get", "patch"]},
        ]);
        let refer = |kind: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": namespace});
        make(
            &format!("{rbac}/clusterroles"),
            json!({"apiVersion": version, "kind": "ClusterRole", "metadata": named, "rules": nodes}),
        );
        make(
            &format!("{rbac}/clusterrolebindings"),
            json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": named, "subjects": who, "roleRef": refer("ClusterRole")}),
        );
        let here = format!("{rbac}/namespaces/{namespace}");
        make(
            &format!("{here}/roles"),
            json!({"apiVersion": version, "kind": "Role", "metadata": named, "rules": own}),
        );
        make(
            &format!("{here}/rolebindings"),
            json!({"apiVersion": version, "kind": "RoleBinding", "metadata": named, "subjects": who, "roleRef": refer("Role")}),
        );
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let token = make(&format!("{accounts}/{namespace}/token"), request);
        let mut config: Value =
            serde_json::from_str(&fs::read_to_string(place.kubeconfig()).unwrap()).unwrap();
        config["users"][0]["user"]["token"] = token["status"]["token"].clone();
        let kubeconfig = place.kubeconfig().with_extension("leave");
        fs::write(&kubeconfig, config.to_string()).unwrap();
        Self {
            server,
            namespace,
            place,
            kubeconfig,
        }
    }

    fn node(&self, name: &str, ready: &str) {
        let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        self.server.create("/api/v1/nodes", &object).unwrap();
        self.set_ready(name, ready);
    }

    fn set_ready(&self, name: &str, ready: &str) {
        let status = json!({"status": {"conditions": [{"type": "Ready", "status": ready, "reason": "Test", "message": ""}]}});
        self.server
            .patch(&format!("/api/v1/nodes/{name}/status"), &status)
            .unwrap();
    }

    fn agent(&self, node: &str) {
        let containers = ["pod-events", "installer"]
            .map(|name| json!({"name": name, "image": format!("registry/{name}:1")}));
        let object = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": format!("inpod-{node}"), "labels": {"app.kubernetes.io/name": "inpod"}},
            "spec": {"nodeName": node, "containers": containers},
        });
        self.server
            .create(
                &format!("/api/v1/namespaces/{}/pods", self.namespace),
                &object,
            )
            .unwrap();
    }

    fn until_mode(&self, wanted: &str) {
        eventually("the mode is said", TIMEOUT, || {
            let (mode, _) = self.mode()?;
            ensure!(mode == wanted, "{mode}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Shows containers that ended with these messages, as the kubelet shows them.
    fn receipts(&self, node: &str, messages: &[(&str, &str)]) {
        let now = humantime(SystemTime::now());
        let status = |(name, message): &(&str, &str)| {
            json!({
                "name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 1,
                "lastState": {"terminated": {"exitCode": 0, "message": message, "finishedAt": now}},
            })
        };
        let statuses: Vec<_> = messages.iter().map(status).collect();
        let change = json!({"status": {"containerStatuses": statuses}});
        let path = format!(
            "/api/v1/namespaces/{}/pods/inpod-{node}/status",
            self.namespace
        );
        self.server.patch(&path, &change).unwrap();
    }

    fn leave(&self, mode: &str, timeout: &str) -> Child {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.place.netns().path().display()));
        command.arg(bin("inpod").unwrap()).args([
            mode,
            "-n",
            &self.namespace,
            "--timeout",
            timeout,
        ]);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Returns the ConfigMap's mode, and since when.
    fn mode(&self) -> anyhow::Result<(String, String)> {
        let map = self.server.get(&format!(
            "/api/v1/namespaces/{}/configmaps/inpod-leave",
            self.namespace
        ))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let since = &map["metadata"]["annotations"]["inpod.io/leave-since"];
        Ok((text(&map["data"]["mode"]), text(since)))
    }
}

fn humantime(time: SystemTime) -> String {
    let seconds = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let date = integration::run(
        "date",
        &["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"],
    );
    date.unwrap().trim().to_owned()
}

fn ended(child: Child) -> (i32, String, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn nodes_get_the_mode_and_are_waited_for_and_those_that_are_not_ready_are_listed() {
    let cluster = Cluster::new();
    for (name, ready) in [
        ("a", "True"),
        ("b", "True"),
        ("lost", "Unknown"),
        ("bare", "True"),
    ] {
        cluster.node(name, ready);
    }
    ["a", "b", "lost"]
        .iter()
        .for_each(|name| cluster.agent(name));
    let mut leave = cluster.leave("uninstall", "120s");
    cluster.until_mode("uninstall");
    cluster.receipts(
        "a",
        &[
            ("installer", "inpod left: uninstall; chain reverted"),
            ("pod-events", "inpod left: uninstall; 2 pods withdrawn"),
        ],
    );
    cluster.receipts(
        "b",
        &[("installer", "inpod left: uninstall; chain reverted")],
    );
    // At least two polls: one of a node's two messages is not enough.
    thread::sleep(Duration::from_secs(5));
    assert!(leave.try_wait().unwrap().is_none(), "it did not wait");
    cluster.receipts(
        "b",
        &[
            ("installer", "inpod left: uninstall; chain reverted"),
            ("pod-events", "inpod left: uninstall; none"),
        ],
    );
    let (code, reported, said) = ended(leave);
    assert_eq!((code, said.as_str()), (0, ""), "{reported}");
    for line in [
        "a: done (installer: chain reverted; pod-events: 2 pods withdrawn)",
        "b: waiting for pod-events",
        "lost: unreachable: its Node is not Ready",
        "bare: unreachable: it has no pod of the agent",
        "2 of 4 nodes done",
        "kubectl debug node/lost -it --profile=sysadmin --image=registry/installer:1 -- /installer uninstall --host-root /host",
    ] {
        assert!(reported.contains(line), "{line}: {reported}");
    }
    // A repeated request changes nothing; completed work stays.
    let before = cluster.mode().unwrap();
    let (code, reported, _) = ended(cluster.leave("uninstall", "20s"));
    assert_eq!((code, cluster.mode().unwrap()), (0, before), "{reported}");
    // Another mode starts over, without the first one's work.
    let (code, reported, said) = ended(cluster.leave("handover", "3s"));
    assert_eq!(code, 1, "{reported}");
    assert!(said.contains("not done in time: a, b"), "{said}");
    assert!(
        reported.contains("-- /installer handover --host-root /host"),
        "{reported}"
    );
    assert_eq!(cluster.mode().unwrap().0, "handover");
}

#[test]
fn a_user_without_permission_is_refused_at_once() {
    let cluster = Cluster::new();
    let name = &cluster.namespace;
    let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings/{name}");
    cluster.server.delete(&roles).unwrap();
    eventually("it is refused", TIMEOUT, || {
        let (code, reported, said) = ended(cluster.leave("uninstall", "60s"));
        ensure!(
            code == 3 && said.contains("forbidden"),
            "{code} {reported} {said}"
        );
        anyhow::Ok(())
    })
    .unwrap();
    assert!(cluster.mode().is_err(), "the mode was said");
}
