//! Applications on chosen nodes, with a Service and an identity of their own.

use std::net::SocketAddr;

use inpod_linux::Netns;
use integration::kubernetes::{Machine, Traffic, text};
use serde_json::{Value, json};

use crate::cluster::{
    agent::{ExclusiveCluster, named, uid},
    apps::{PORT, container, template},
};

/// The port of each Service.
pub(crate) const SERVICE_PORT: u16 = 80;

/// A Deployment and its Service.
pub(crate) struct App<'a> {
    pub(crate) cluster: &'a ExclusiveCluster<'a>,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) replicas: usize,
}

impl<'a> App<'a> {
    /// Creates the application, and waits until its pods are ready. Without a node, the scheduler chooses one.
    pub(crate) fn deploy(
        cluster: &'a ExclusiveCluster<'a>,
        namespace: &'a str,
        name: &'a str,
        node: Option<&Machine>,
        replicas: usize,
    ) -> Self {
        Self::deploy_with(
            cluster,
            (namespace, name),
            node,
            replicas,
            &container(&json!({})),
        )
    }

    /// The same with a container and its probes.
    pub(crate) fn deploy_with(
        cluster: &'a ExclusiveCluster<'a>,
        named: (&'a str, &'a str),
        node: Option<&Machine>,
        replicas: usize,
        container: &Value,
    ) -> Self {
        let app = Self::start(cluster, named, node, replicas, container);
        app.pods();
        app
    }

    /// The same without waiting for its pods.
    pub(crate) fn start(
        cluster: &'a ExclusiveCluster<'a>,
        (namespace, name): (&'a str, &'a str),
        node: Option<&Machine>,
        replicas: usize,
        container: &Value,
    ) -> Self {
        let app = Self {
            cluster,
            namespace,
            name,
            replicas,
        };
        let metadata = json!({"name": name, "namespace": namespace});
        let mut pods = template(name, container);
        let spec = pods.pointer_mut("/spec").unwrap().as_object_mut().unwrap();
        spec.insert("serviceAccountName".to_owned(), json!(name));
        if let Some(node) = node {
            let selector = json!({"kubernetes.io/hostname": node.node.name()});
            spec.insert("nodeSelector".to_owned(), selector);
        }
        let selector = json!({"app": name});
        let core = format!("/api/v1/namespaces/{namespace}");
        let apps = format!("/apis/apps/v1/namespaces/{namespace}");
        let port = json!({"name": "http", "port": SERVICE_PORT, "targetPort": PORT});
        for (path, object) in [
            (
                format!("{core}/serviceaccounts"),
                json!({"metadata": metadata}),
            ),
            (
                format!("{core}/services"),
                json!({"metadata": metadata, "spec": {
                    "type": "NodePort", "ipFamilyPolicy": "PreferDualStack", "selector": selector, "ports": [port],
                }}),
            ),
            (
                format!("{apps}/deployments"),
                json!({
                    "metadata": metadata,
                    "spec": {"replicas": replicas, "selector": {"matchLabels": selector}, "template": pods},
                }),
            ),
        ] {
            cluster.server.create(&path, &object).unwrap();
        }
        app
    }

    /// Returns the pods, once all are ready.
    pub(crate) fn pods(&self) -> Vec<Value> {
        let label = format!("app={}", self.name);
        let ready = self
            .cluster
            .until_ready(self.namespace, &label, self.replicas);
        ready.unwrap()
    }

    pub(crate) fn pod(&self) -> Value {
        self.pods().first().unwrap().clone()
    }

    fn service(&self) -> Value {
        let path = format!(
            "/api/v1/namespaces/{}/services/{}",
            self.namespace, self.name
        );
        self.cluster.server.get(&path).unwrap()
    }

    /// Returns the first virtual address.
    pub(crate) fn virtual_address(&self) -> SocketAddr {
        self.virtual_addresses().first().copied().unwrap()
    }

    /// Returns the virtual addresses, one per family.
    pub(crate) fn virtual_addresses(&self) -> Vec<SocketAddr> {
        let service = self.service();
        let all = service
            .pointer("/spec/clusterIPs")
            .and_then(Value::as_array);
        let address =
            |ip: &Value| SocketAddr::new(ip.as_str().unwrap().parse().unwrap(), SERVICE_PORT);
        all.unwrap().iter().map(address).collect()
    }

    pub(crate) fn node_port(&self) -> u16 {
        let service = self.service();
        let port = service.pointer("/spec/ports/0/nodePort").unwrap();
        u16::try_from(port.as_u64().unwrap()).unwrap()
    }

    /// Changes the number of pods, and waits until they are ready.
    pub(crate) fn scale(&mut self, replicas: usize) {
        self.start_scaling(replicas);
        self.pods();
    }

    pub(crate) fn start_scaling(&mut self, replicas: usize) {
        let path = format!(
            "/apis/apps/v1/namespaces/{}/deployments/{}/scale",
            self.namespace, self.name
        );
        let change = json!({"spec": {"replicas": replicas}});
        self.cluster.server.patch(&path, &change).unwrap();
        self.replicas = replicas;
    }

    /// Asks the application's Service again and again from a pod.
    pub(crate) fn traffic_from(&self, pod: &Value) -> Traffic {
        Traffic::start(netns_of(self.cluster, pod), self.virtual_address())
    }
}

/// Returns the addresses of a pod's application, one per family.
pub(crate) fn addresses(pod: &Value) -> Vec<SocketAddr> {
    let all = pod.pointer("/status/podIPs").and_then(Value::as_array);
    let address = |ip: &Value| SocketAddr::new(text(ip, "/ip").parse().unwrap(), PORT);
    all.unwrap().iter().map(address).collect()
}

pub(crate) fn netns_of(cluster: &ExclusiveCluster<'_>, pod: &Value) -> Netns {
    cluster.machine_of(pod).netns_of(uid(pod)).unwrap()
}

/// Runs a command in the application's container.
pub(crate) fn execute(
    cluster: &ExclusiveCluster<'_>,
    pod: &Value,
    command: &[&str],
) -> anyhow::Result<String> {
    let (namespace, name) = named(pod);
    let exec = ["exec", "--namespace", namespace, name, "--"];
    cluster.kubectl(&[&exec[..], command].concat())
}

/// Waits until every pod is in the mesh.
pub(crate) fn until_enrolled(cluster: &ExclusiveCluster<'_>, pods: &[Value]) {
    for pod in pods {
        cluster.until_enrolled(pod);
    }
}

pub(crate) fn make_ambient(cluster: &ExclusiveCluster<'_>, namespace: &str) {
    let labels = json!({"istio.io/dataplane-mode": "ambient"});
    cluster.make_namespace(namespace, &labels).unwrap();
}
