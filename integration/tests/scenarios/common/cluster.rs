//! A node whose pods are objects of a real API server.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, ensure};
use integration::{ApiProxy, ApiServer, Call, Node, Outcome, Pod, Spec, TIMEOUT, eventually};
use serde_json::{Value, json};

static NEXT: AtomicU32 = AtomicU32::new(1);

/// An API server, and a node and namespace for each test.
pub(crate) struct Cluster {
    pub(crate) node: Node,
    pub(crate) server: Arc<ApiServer>,
    pub(crate) namespace: String,
}

impl Cluster {
    fn on(server: Arc<ApiServer>) -> Self {
        let node = Node::of_cluster(&server).unwrap();
        let namespace = format!("shop-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let cluster = Self {
            node,
            server,
            namespace,
        };
        cluster.make_namespace(&cluster.namespace, &json!({}));
        cluster
    }

    /// Creates one on the shared server, running.
    pub(crate) fn shared() -> Self {
        let cluster = Self::on(ApiServer::shared().unwrap());
        cluster.start();
        cluster.node.ready().unwrap();
        cluster
    }

    /// Creates one on the shared server; the node's services do not run yet.
    pub(crate) fn waiting() -> Self {
        Self::on(ApiServer::shared().unwrap())
    }

    /// Creates one on the shared server, reached through a proxy; its services do not run yet.
    pub(crate) fn behind_proxy() -> (Self, ApiProxy) {
        let cluster = Self::on(ApiServer::shared().unwrap());
        let proxy = ApiProxy::start(cluster.node.netns(), &cluster.node.kubeconfig()).unwrap();
        (cluster, proxy)
    }

    /// The same, running, with both watches open.
    pub(crate) fn running_behind_proxy() -> (Self, ApiProxy) {
        let (cluster, proxy) = Self::behind_proxy();
        cluster.start();
        cluster.node.ready().unwrap();
        cluster.until_pods(true);
        eventually("both watches are open", TIMEOUT, || {
            let open = proxy.open_watches();
            ensure!(open == 2, "{open} watches");
            anyhow::Ok(())
        })
        .unwrap();
        (cluster, proxy)
    }

    /// Creates one on a server that the test may stop; the node's services do not run yet.
    pub(crate) fn on_own_server() -> Self {
        Self::on(Arc::new(ApiServer::start().unwrap()))
    }

    /// Waits until pod-events has synchronized the others.
    pub(crate) fn start(&self) {
        self.node.start_all().unwrap();
        self.until_served();
    }

    pub(crate) fn until_served(&self) {
        eventually("the agent serves", TIMEOUT, || {
            let status = self.node.api().status()?;
            let ztunnel = status
                .conditions
                .iter()
                .find(|found| found.name == "ztunnel");
            ensure!(status.ready, "{status:?}");
            ensure!(ztunnel.is_some_and(|found| found.ok), "{status:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn make_namespace(&self, name: &str, annotations: &Value) {
        let metadata = json!({"name": name, "annotations": annotations});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        self.server.create("/api/v1/namespaces", &object).unwrap();
    }

    pub(crate) fn label_namespace(&self, mode: &str) {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
        let path = format!("/api/v1/namespaces/{}", self.namespace);
        self.server.patch(&path, &change).unwrap();
    }

    pub(crate) fn object(&self, name: &str, mode: Option<&str>) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {"istio.io/dataplane-mode": mode},
            },
            "spec": {
                "nodeName": self.node.name(),
                "serviceAccountName": format!("sa-{name}"),
                "containers": [{"name": "app", "image": "app"}],
            },
        })
    }

    pub(crate) fn create(&self, object: &Value) -> String {
        let namespace = object.pointer("/metadata/namespace").unwrap();
        let path = format!("/api/v1/namespaces/{}/pods", namespace.as_str().unwrap());
        let mut object = object.clone();
        // A null label means no label.
        if object.pointer("/metadata/labels/istio.io~1dataplane-mode") == Some(&Value::Null) {
            *object.pointer_mut("/metadata/labels").unwrap() = json!({});
        }
        let made = self.server.create(&path, &object).unwrap();
        let uid = made.pointer("/metadata/uid").and_then(Value::as_str);
        uid.unwrap().to_owned()
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    /// Returns a sandbox as the chain leaves it; its pod need not exist.
    pub(crate) fn sandbox(&self, name: &str, uid: &str) -> Pod {
        let spec = Spec {
            namespace: self.namespace.clone(),
            uid: uid.to_owned(),
            ..Spec::new(name)
        };
        self.node.sandbox(spec).unwrap()
    }

    pub(crate) fn pod(&self, name: &str, mode: Option<&str>) -> Pod {
        let uid = self.create(&self.object(name, mode));
        let pod = self.sandbox(name, &uid);
        self.node.add(&pod).unwrap();
        pod
    }

    pub(crate) fn add_as(&self, pod: &Pod, uid: &str) -> Call {
        let mut call = self.node.call(Call::add, pod);
        for (name, value) in &mut call.environment {
            if name == "CNI_ARGS" {
                let end = value.find(";K8S_POD_UID=").unwrap();
                value.truncate(end);
                value.push_str(uid);
            }
        }
        call
    }

    /// Calls ADD with a time limit in seconds.
    pub(crate) fn add_within(&self, pod: &Pod, seconds: u64) -> Outcome {
        let call = self.node.call(Call::add, pod);
        call.timeout_seconds(seconds).run().unwrap()
    }

    pub(crate) fn until_shown(&self, name: &str) {
        eventually("the watch shows the pod", TIMEOUT, || {
            self.node.api().explain(&self.namespace, name)
        })
        .unwrap();
    }

    pub(crate) fn until_shown_as(&self, name: &str, uid: &str) {
        eventually("the watch shows the pod", TIMEOUT, || {
            let known = self.node.api().explain(&self.namespace, name)?;
            let found = known.pod.context("a pod")?.uid;
            ensure!(found == uid, "it shows {found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Waits for the source's condition and returns its message.
    pub(crate) fn until_pods(&self, ok: bool) -> String {
        eventually("the condition pods", TIMEOUT, || {
            let status = self.node.api().status()?;
            let mut all = status.conditions.into_iter();
            let found = all.find(|found| found.name == "pods").context("none")?;
            ensure!(found.ok == ok, "{found:?}");
            let is_new = !found.message.contains("not been listed yet");
            ensure!(is_new, "{found:?}");
            anyhow::Ok(found.message)
        })
        .unwrap()
    }

    /// Waits until the source's condition has a message with all of these.
    pub(crate) fn until_message(&self, words: &[&str]) {
        eventually("the condition pods says so", TIMEOUT, || {
            let reported = self.until_pods(false);
            let missing = words.iter().find(|word| !reported.contains(**word));
            ensure!(missing.is_none(), "{missing:?} is not in {reported}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn until_namespace_is_listed(&self, namespace: &str) {
        let path = self.node.state_dir().join("enrolled-namespaces");
        eventually("the namespace is listed", TIMEOUT, || {
            let found = std::fs::read_to_string(&path)?;
            ensure!(found.lines().any(|line| line == namespace), "{found:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

pub(crate) fn refused(outcome: &Outcome, code: u64, words: &[&str]) {
    let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(error.get("code"), Some(&code.into()), "{outcome:?}");
    for word in words {
        assert!(outcome.stdout.contains(word), "{word}: {outcome:?}");
    }
}
