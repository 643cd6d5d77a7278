//! A node of a cluster, and its pods.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, ensure};
use integration::{ApiProxy, ApiServer, Node, Pod, Spec, TIMEOUT, eventually};
use serde_json::{Value, json};

pub(super) fn fill(server: &ApiServer, namespaces: usize) -> anyhow::Result<()> {
    let missing = namespaces.saturating_sub(count(server)?);
    let objects = (0..missing).map(|number| namespace(&format!("filler-{number}")));
    server.create_all(&objects.collect::<Vec<_>>())?;
    let found = count(server)?;
    ensure!(found == namespaces, "{found} namespaces");
    Ok(())
}

fn count(server: &ApiServer) -> anyhow::Result<usize> {
    let page = server.get("/api/v1/namespaces?limit=1")?;
    let more = page.pointer("/metadata/remainingItemCount");
    let more = more.and_then(Value::as_u64).unwrap_or_default();
    Ok(usize::try_from(more)? + 1)
}

/// Labels and annotations are those of real clusters.
fn namespace(name: &str) -> (String, Value) {
    let metadata = json!({
        "name": name,
        "labels": {"kubernetes.io/metadata.name": name, "team": format!("team-of-{name}")},
        "annotations": {"example.com/owner": format!("{name}@example.com")},
    });
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
    ("/api/v1/namespaces".to_owned(), object)
}

/// All services; its pods are an API server's, in one namespace.
pub(super) struct Cluster {
    pub(super) node: Node,
    pub(super) server: Arc<ApiServer>,
    pods: Vec<Pod>,
    namespace: String,
}

impl Cluster {
    /// Starts a node without pods.
    pub(super) fn empty(server: &Arc<ApiServer>) -> anyhow::Result<Self> {
        let cluster = Self::stopped(server)?;
        cluster.start()?;
        Ok(cluster)
    }

    /// A proxy is between pod-events and the API server; no pods.
    pub(super) fn behind_proxy(
        server: &Arc<ApiServer>,
        instruct: impl FnOnce(&ApiProxy),
    ) -> anyhow::Result<(Self, ApiProxy)> {
        let cluster = Self::stopped(server)?;
        let proxy = ApiProxy::start(cluster.node.netns(), &cluster.node.kubeconfig())?;
        instruct(&proxy);
        cluster.start()?;
        Ok((cluster, proxy))
    }

    pub(super) fn full(server: &Arc<ApiServer>, pods: usize) -> anyhow::Result<Self> {
        let mut cluster = Self::empty(server)?;
        let names: Vec<_> = (0..pods).map(|number| format!("web-{number}")).collect();
        let specs = cluster.create_all(&names)?;
        cluster.pods = cluster.node.pods(specs)?;
        Ok(cluster)
    }

    fn stopped(server: &Arc<ApiServer>) -> anyhow::Result<Self> {
        let node = Node::of_cluster(server)?;
        let namespace = format!("shop-of-{}", node.name());
        server.create_all(&[self::namespace(&namespace)])?;
        Ok(Self {
            node,
            server: Arc::clone(server),
            pods: Vec::new(),
            namespace,
        })
    }

    fn start(&self) -> anyhow::Result<()> {
        self.node.start_all()?;
        self.node.ready()
    }

    pub(super) fn pods(&self) -> usize {
        self.pods.len()
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    fn collection(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.namespace)
    }

    pub(super) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.collection())
    }

    /// Creates pods of the mesh, as a runtime then sees them.
    pub(super) fn create_all(&self, names: &[String]) -> anyhow::Result<Vec<Spec>> {
        let objects = names
            .iter()
            .map(|name| (self.collection(), self.object(name)));
        self.server.create_all(&objects.collect::<Vec<_>>())?;
        let listed = self.server.get(&self.collection())?;
        let items = listed.get("items").and_then(Value::as_array);
        let items = items.context("a list has items")?.iter();
        let uids: BTreeMap<_, _> = items.filter_map(name_and_uid).collect();
        let spec = |name: &String| {
            let uid = uids.get(name.as_str()).copied();
            Ok(self.spec(name, uid.context("a pod was not made")?))
        };
        names.iter().map(spec).collect()
    }

    /// The sandbox exists before the pod, so that the next step can follow at once.
    pub(super) fn create(&self, name: &str) -> anyhow::Result<Pod> {
        let mut pod = self.node.sandbox(self.spec(name, ""))?;
        let made = self.server.create(&self.collection(), &self.object(name))?;
        let (_, uid) = name_and_uid(&made).context("a pod has a UID")?;
        uid.clone_into(&mut pod.spec.uid);
        Ok(pod)
    }

    pub(super) fn delete(&self, pod: &Pod) -> anyhow::Result<()> {
        self.node.del(pod)?;
        self.server.delete(&self.path(&pod.spec.name))
    }

    pub(super) fn until_shown(&self, name: &str) -> anyhow::Result<()> {
        let shown = || self.node.api().explain(&self.namespace, name);
        eventually("the watch shows the pod", TIMEOUT, shown).map(drop)
    }

    fn spec(&self, name: &str, uid: &str) -> Spec {
        Spec {
            namespace: self.namespace.clone(),
            uid: uid.to_owned(),
            ..Spec::new(name).ambient()
        }
    }

    fn object(&self, name: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name, "istio.io/dataplane-mode": "ambient"}},
            "spec": {
                "nodeName": self.node.name(),
                "serviceAccountName": format!("sa-{name}"),
                "containers": [{"name": "app", "image": "app"}],
            },
        })
    }
}

fn name_and_uid(object: &Value) -> Option<(&str, &str)> {
    let text = |path| object.pointer(path).and_then(Value::as_str);
    Some((text("/metadata/name")?, text("/metadata/uid")?))
}
