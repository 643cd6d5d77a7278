//! `inpod binds --services` with what kubectl prints of a real API server.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Command, Output, Stdio},
};

use crate::common::cluster::Cluster;
use integration::{Pod, bin, tool};
use serde_json::{Value, json};

/// A pod with an application and a Service.
struct Shop {
    cluster: Cluster,
    web: Pod,
    _listening: TcpListener,
}

impl Shop {
    /// The application listens on 8080, which containers and Services name; nothing listens on 7000.
    fn new() -> Self {
        let cluster = Cluster::shared();
        let mut object = cluster.object("web", None);
        object["metadata"]["labels"] = json!({"app": "web", "istio.io/dataplane-mode": "none"});
        object["spec"]["containers"][0]["ports"] = json!([
            {"name": "http", "containerPort": 8080},
            {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
        ]);
        let uid = cluster.create(&object);
        let web = cluster.sandbox("web", &uid);
        cluster.node.add(&web).unwrap();
        let address = SocketAddr::new(web.v4.into(), 8080);
        let listening = web.netns.within(|| TcpListener::bind(address));
        let shop = Self {
            _listening: listening.unwrap().unwrap(),
            cluster,
            web,
        };
        shop.serve(&uid);
        shop
    }

    /// Creates an EndpointSlice, as the controller makes it.
    fn serve(&self, uid: &str) {
        let namespace = &self.cluster.namespace;
        let target = json!({"kind": "Pod", "namespace": namespace, "name": "web", "uid": uid});
        let endpoint = json!({"addresses": [self.web.v4], "nodeName": self.cluster.node.name(), "targetRef": target});
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "sliced-x", "labels": {"kubernetes.io/service-name": "sliced"}},
            "addressType": "IPv4",
            "ports": [
                {"name": "http", "port": 8080, "protocol": "TCP"},
                {"name": "closed", "port": 7000, "protocol": "TCP"},
                {"name": "dns", "port": 5353, "protocol": "UDP"},
            ],
            "endpoints": [endpoint],
        });
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices");
        self.cluster.server.create(&path, &slice).unwrap();
    }

    /// Returns what `kubectl get -o json` prints of the shop's namespace.
    fn get(&self, resource: &str) -> Vec<u8> {
        let mut command = self.cluster.server.beside(&tool("KUBECTL").unwrap());
        let output = command
            .args(["get", resource, "-o", "json", "--token", "admin"])
            .args(["-n", &self.cluster.namespace])
            .env("KUBECONFIG", self.cluster.node.kubeconfig())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }

    fn binds(&self, file: &Path, input: &[u8]) -> Output {
        let mut command = Command::new(bin("inpod").unwrap());
        command.arg("--run-dir").arg(self.cluster.node.run_dir());
        command.args(["binds", "-o", "json", "-n", &self.cluster.namespace]);
        command.arg("--services").arg(file).env_clear();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap()
    }
}

/// Returns each port with its protocol, its bind and its Services.
fn ports(output: &Output) -> Vec<(u64, String, String, String)> {
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["pods"].as_array().unwrap().len(), 1, "{answer}");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let reported = |port: &Value| {
        let services = port["services"].as_array().into_iter().flatten();
        let services: Vec<_> = services.map(text).collect();
        let number = port["port"].as_u64().unwrap();
        (
            number,
            text(&port["protocol"]),
            text(&port["kind"]),
            services.join(" "),
        )
    };
    answer["pods"][0]["ports"]
        .as_array()
        .unwrap()
        .iter()
        .map(reported)
        .collect()
}

fn port(number: u64, protocol: &str, kind: &str, services: &str) -> (u64, String, String, String) {
    (
        number,
        format!("PORT_PROTOCOL_{protocol}"),
        format!("BIND_KIND_{kind}"),
        services.to_owned(),
    )
}

#[test]
fn binds_names_the_services_of_slices_that_kubectl_printed() {
    let shop = Shop::new();
    let slices = shop.get("endpointslices");
    let wanted = [
        port(7000, "TCP", "NOT_FOUND", "sliced"),
        port(8080, "TCP", "POD_IP", "sliced"),
        port(5353, "UDP", "NOT_FOUND", "sliced"),
    ];
    let piped = shop.binds(Path::new("-"), &slices);
    assert_eq!(piped.status.code(), Some(0), "{piped:?}");
    assert_eq!(ports(&piped), wanted);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("slices");
    std::fs::write(&file, &slices).unwrap();
    let read = shop.binds(&file, b"");
    assert_eq!(read.status.code(), Some(0), "{read:?}");
    assert_eq!(ports(&read), wanted);
}

#[test]
fn binds_reports_the_rest_if_the_slices_are_unusable() {
    let shop = Shop::new();
    let pods = shop.get("pods");
    let unusable = |input: &[u8], code| {
        let output = shop.binds(Path::new("-"), input);
        let reported = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{reported}");
        let start = "inpod: the ports of Services are missing: cannot use standard input: ";
        assert!(reported.starts_with(start), "{reported}");
        assert!(reported.contains("kubectl get"), "{reported}");
        assert!(ports(&output).contains(&port(8080, "TCP", "POD_IP", "")));
        reported
    };
    let named = format!("Pod {}/web: kind: expected", shop.cluster.namespace);
    assert!(unusable(&pods, 3).contains(&named));
    assert!(unusable(b"", 3).contains("it is empty"));
    // A port that enrollment changes outweighs the input.
    let taken = SocketAddr::new([127, 0, 0, 1].into(), 15006);
    let taken = shop.web.netns.within(|| TcpListener::bind(taken));
    let _taken = taken.unwrap().unwrap();
    assert!(unusable(b"", 4).contains("ports that enrollment changes: 1"));
}
