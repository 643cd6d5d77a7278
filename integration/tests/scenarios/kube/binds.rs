//! `inpod binds --services`: Services are read with the caller's permissions, and a missing one is named.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use crate::common::cluster::Cluster;
use anyhow::ensure;
use integration::{Pod, TIMEOUT, bin, eventually};
use serde_json::{Value, json};

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

/// A pod with an application and Services.
struct Shop {
    cluster: Cluster,
    web: Pod,
    _listening: TcpListener,
}

/// A user who may list some resources of the shop's namespace.
struct Person {
    name: &'static str,
    kubeconfig: PathBuf,
}

impl Shop {
    /// The application listens on 8080, which containers and Services name; nothing listens on 7000 and 9000.
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

    /// Creates Services with an EndpointSlice, as the controller makes it, and without.
    fn serve(&self, uid: &str) {
        let target =
            json!({"kind": "Pod", "namespace": self.cluster.namespace, "name": "web", "uid": uid});
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
        self.make("/apis/discovery.k8s.io/v1", "endpointslices", &slice);
    }

    fn make(&self, group: &str, kind: &str, object: &Value) -> Value {
        let namespace = &self.cluster.namespace;
        let path = format!("{group}/namespaces/{namespace}/{kind}");
        self.cluster.server.create(&path, object).unwrap()
    }

    fn person(&self, name: &'static str) -> Person {
        let metadata = json!({"name": name});
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata});
        self.make("/api/v1", "serviceaccounts", &account);
        let asked =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let token = self.make("/api/v1", &format!("serviceaccounts/{name}/token"), &asked);
        let kubeconfig = self.cluster.node.kubeconfig();
        let mut config: Value = serde_json::from_slice(&fs::read(&kubeconfig).unwrap()).unwrap();
        config["users"][0]["user"]["token"] = token["status"]["token"].clone();
        let kubeconfig = kubeconfig.with_file_name(format!("kubeconfig-{name}"));
        fs::write(&kubeconfig, config.to_string()).unwrap();
        Person { name, kubeconfig }
    }

    fn allow(&self, person: &Person, group: &str, resource: &str) {
        let name = format!("{}-{resource}", person.name);
        let rule = json!({"apiGroups": [group], "resources": [resource], "verbs": ["list"]});
        let role = json!({"metadata": {"name": name}, "rules": [rule]});
        self.make(RBAC, "roles", &role);
        let subject = json!({"kind": "ServiceAccount", "name": person.name, "namespace": self.cluster.namespace});
        let to = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
        let binding = json!({"metadata": {"name": name}, "roleRef": to, "subjects": [subject]});
        self.make(RBAC, "rolebindings", &binding);
    }

    fn binds(&self, person: &Person, more: &[&str]) -> Output {
        let mut command = Command::new("nsenter");
        command.arg(format!(
            "--net={}",
            self.cluster.node.netns().path().display()
        ));
        command.arg(bin("inpod").unwrap()).arg("--run-dir");
        command.arg(self.cluster.node.run_dir());
        command
            .args(["binds", "--services", "--kubeconfig"])
            .arg(&person.kubeconfig);
        command.args(more).stdin(Stdio::null()).output().unwrap()
    }

    /// Repeats until this result: a server applies new permissions with a delay.
    fn until_binds(&self, person: &Person, code: i32, said: &str) -> Output {
        let namespace = ["-n", self.cluster.namespace.as_str(), "-o", "json"];
        eventually("it is answered so", TIMEOUT, || {
            let output = self.binds(person, &namespace);
            let reported = String::from_utf8_lossy(&output.stderr);
            ensure!(
                output.status.code() == Some(code) && reported.contains(said),
                "{output:?}"
            );
            anyhow::Ok(output)
        })
        .unwrap()
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
fn a_missing_right_is_named_and_the_rest_is_reported() {
    let shop = Shop::new();
    let person = shop.person("somebody");
    let user = format!("system:serviceaccount:{}:somebody", shop.cluster.namespace);
    let cannot = format!(
        "cannot list endpointslices: endpointslices.discovery.k8s.io is forbidden: User \"{user}\" cannot list resource \"endpointslices\" in API group \"discovery.k8s.io\" in the namespace \"{}\"",
        shop.cluster.namespace
    );
    let dns = port(5353, "UDP", "NOT_FOUND", "");
    let nothing = shop.until_binds(&person, 3, &cannot);
    assert_eq!(ports(&nothing), [port(8080, "TCP", "POD_IP", ""), dns]);
    let reported = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert!(
        reported.starts_with("inpod: the ports of Services are missing: "),
        "{reported}"
    );
    assert!(
        reported.contains("What to do: ") && reported.contains("KUBECONFIG"),
        "{reported}"
    );
    shop.allow(&person, "discovery.k8s.io", "endpointslices");
    let all = shop.until_binds(&person, 0, "");
    assert!(all.stderr.is_empty(), "{all:?}");
    let wanted = [
        port(7000, "TCP", "NOT_FOUND", "sliced"),
        port(8080, "TCP", "POD_IP", "sliced"),
        port(5353, "UDP", "NOT_FOUND", "sliced"),
    ];
    assert_eq!(ports(&all), wanted);
    // The permissions cover only the namespace.
    let everywhere = shop.binds(&person, &[]);
    let reported = String::from_utf8_lossy(&everywhere.stderr);
    assert_eq!(everywhere.status.code(), Some(3), "{reported}");
    assert!(
        reported.contains("cannot list endpointslices")
            && reported.contains("at the cluster scope"),
        "{reported}"
    );
}

#[test]
fn what_changes_outweighs_what_could_not_be_asked_for() {
    let shop = Shop::new();
    let person = shop.person("nobody");
    let taken = SocketAddr::new([127, 0, 0, 1].into(), 15006);
    let taken = shop.web.netns.within(|| TcpListener::bind(taken));
    let _taken = taken.unwrap().unwrap();
    let output = shop.until_binds(&person, 4, "cannot list endpointslices: ");
    let reported = String::from_utf8_lossy(&output.stderr);
    assert!(
        reported.contains("ports that enrollment changes: 1"),
        "{reported}"
    );
}

#[test]
fn a_token_that_nobody_gave_and_a_server_that_is_not_there_are_reported_too() {
    let shop = Shop::new();
    let person = shop.person("stranger");
    let change = |pointer: &str, value: &str| {
        let mut config: Value =
            serde_json::from_slice(&fs::read(&person.kubeconfig).unwrap()).unwrap();
        *config.pointer_mut(pointer).unwrap() = value.into();
        fs::write(&person.kubeconfig, config.to_string()).unwrap();
    };
    change("/users/0/user/token", "made-up");
    shop.until_binds(&person, 3, "cannot list endpointslices: Unauthorized");
    change("/clusters/0/cluster/server", "https://10.78.0.1:1");
    shop.until_binds(&person, 3, "cannot list endpointslices: ");
    fs::write(&person.kubeconfig, "- no kubeconfig").unwrap();
    let words = format!("cannot use {}: ", person.kubeconfig.display());
    let output = shop.until_binds(&person, 3, &words);
    assert_eq!(ports(&output).len(), 2);
}
