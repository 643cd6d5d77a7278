//! The script reads objects with the rights of its user, and hands them to the client of each node.

use std::{fs, process::Output};

use anyhow::ensure;
use integration::{TIMEOUT, eventually};
use serde_json::{Value, json};

use super::{Agents, SERVICES, running, text};

impl Agents {
    fn make(&self, group: &str, resource: &str, object: &Value) {
        let path = format!("{group}/namespaces/{}/{resource}", self.cluster.namespace);
        self.cluster.server.create(&path, object).unwrap();
    }

    /// Allows the user to list a resource in the namespace of the pod `web`.
    fn allow(&self, group: &str, resource: &str) {
        let (name, rbac) = (&self.namespace, "/apis/rbac.authorization.k8s.io/v1");
        let rule = json!({"apiGroups": [group], "resources": [resource], "verbs": ["list"]});
        let role = json!({"metadata": {"name": resource}, "rules": [rule]});
        self.make(rbac, "roles", &role);
        let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": name});
        let to = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": resource});
        let binding = json!({"metadata": {"name": resource}, "roleRef": to, "subjects": [subject]});
        self.make(rbac, "rolebindings", &binding);
    }

    /// Creates a slice of the Service `sliced`. A pod with a strange name is one that a user may name.
    fn slice(&self, node: &str, pod: &str, uid: &str, port: u16) {
        let target =
            json!({"kind": "Pod", "namespace": self.cluster.namespace, "name": pod, "uid": uid});
        let slice = json!({
            "metadata": {"generateName": "sliced-", "labels": {"kubernetes.io/service-name": "sliced"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "any"}],
            "endpoints": [{"addresses": ["10.0.0.2"], "nodeName": node, "targetRef": target}],
        });
        self.make("/apis/discovery.k8s.io/v1", "endpointslices", &slice);
    }

    fn uid(&self, pod: &str) -> String {
        let pod = self.cluster.server.get(&self.cluster.path(pod)).unwrap();
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        uid.unwrap().to_owned()
    }

    /// Repeats a command until it is answered so: a server applies new rights with a delay.
    fn until(&self, arguments: &[&str], is_answered: impl Fn(&Output) -> bool) -> Output {
        eventually("the new rights apply", TIMEOUT, || {
            let output = self.run(arguments);
            ensure!(is_answered(&output), "{output:?}");
            anyhow::Ok(output)
        })
        .unwrap()
    }
}

#[test]
fn binds_hands_the_users_slices_to_every_node() {
    let agents = Agents::new();
    let (node, shop) = (agents.cluster.node.name(), &agents.cluster.namespace);
    let uid = agents.uid("web");
    agents.slice(node, "web", &uid, 7000);
    agents.slice(node, "web\n\"\\", &uid, 7001);
    agents.slice("elsewhere", "web", &uid, 7002);
    let binds = ["binds", "--services", "-n", shop];

    let output = agents.run(&binds);
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(
        printed.contains(" web ") && !printed.contains("sliced"),
        "{printed}"
    );
    let missing = format!(
        "kubectl inpod: the ports of Services are missing: Error from server (Forbidden): endpointslices.discovery.k8s.io is forbidden: User \"system:serviceaccount:{0}:{0}\" cannot list resource \"endpointslices\" in API group \"discovery.k8s.io\" in the namespace \"{shop}\"\n  What to do: get the right to list endpointslices (discovery.k8s.io) in the namespace {shop}.\n",
        agents.namespace
    );
    assert_eq!(errors, missing);

    agents.allow("discovery.k8s.io", "endpointslices");
    let output = agents.until(&binds, |output| output.status.code() == Some(0));
    let printed = text(&output.stdout);
    let rows: Vec<_> = printed.lines().skip(1).collect();
    assert_eq!(rows.len(), 1, "{printed}");
    let words: Vec<_> = rows[0].split_whitespace().collect();
    let row = format!("{node} {shop} web 7000/TCP service sliced not found - unchanged -");
    assert_eq!(words.join(" "), row);
    let named = agents.run(&["binds", "--services", &format!("{shop}/web")]);
    assert_eq!(text(&named.stdout), printed);

    // A node without an answer is named, and the slices are read once for all nodes.
    agents.pod("node-silent", &SERVICES.map(|name| (name, running())));
    fs::remove_file(agents.directory.path().join("calls")).unwrap();
    let output = agents.run(&binds);
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(printed.contains("service sliced"), "{printed}");
    assert_eq!(errors, "node-silent: no answer within 20 s\n");
    let calls = fs::read_to_string(agents.directory.path().join("calls")).unwrap();
    assert_eq!(calls.matches("get endpointslices").count(), 1, "{calls}");
    assert_eq!(calls.matches(" exec ").count(), 2, "{calls}");

    // The right covers only the namespace.
    let errors = text(&agents.run(&["binds", "--services"]).stderr);
    assert!(errors.contains("at the cluster scope"), "{errors}");
    assert!(errors.contains(") in all namespaces.\n"), "{errors}");
}

#[test]
fn explain_names_a_network_policy_that_closes_port_15008() {
    let agents = Agents::new();
    let pod = format!("{}/web", agents.cluster.namespace);
    let explain = ["explain", pod.as_str()];
    let networking = "/apis/networking.k8s.io/v1";
    let policy = |name: &str, ingress: &Value| {
        let selector =
            json!({"matchExpressions": [{"key": "istio.io/dataplane-mode", "operator": "Exists"}]});
        let spec = json!({"podSelector": selector, "ingress": ingress});
        let policy = json!({"metadata": {"name": name}, "spec": spec});
        agents.make(networking, "networkpolicies", &policy);
    };
    policy("web-only", &json!([{"ports": [{"port": 8080}]}]));

    let output = agents.run(&explain);
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert!(printed.contains("State       enrolled"), "{printed}");
    assert!(
        errors.starts_with("kubectl inpod: network policies are not checked: Error from server")
            && errors.contains("cannot list resource \"networkpolicies\""),
        "{errors}"
    );

    agents.allow("networking.k8s.io", "networkpolicies");
    let output = agents.until(&explain, |output| output.stderr.is_empty());
    let printed = text(&output.stdout);
    let sentence = "The network policy web-only selects this pod and admits no TCP port 15008, so ztunnels of other nodes and pods cannot reach it by HBONE: add an ingress rule for port 15008.";
    assert!(
        printed.contains(&format!("\nNetwork policies\n  {sentence}\n")),
        "{printed}"
    );
    let json = agents.run(&["explain", &pod, "-o", "json"]);
    let errors = text(&json.stderr);
    assert_eq!(
        errors,
        format!("{}: inpod: {sentence}\n", agents.cluster.node.name())
    );
    serde_json::from_slice::<Value>(&json.stdout).unwrap();

    // The policy selects the pod, too, but ztunnel does not serve the pod.
    let cluster = &agents.cluster;
    let uid = cluster.create(&cluster.object("plain", Some("none")));
    let plain = cluster.sandbox("plain", &uid);
    cluster.node.add(&plain).unwrap();
    let output = agents.run(&["explain", &format!("{}/plain", cluster.namespace)]);
    let printed = text(&output.stdout);
    assert!(printed.contains("State       out"), "{printed}");
    assert!(!printed.contains("Network policies"), "{printed}");

    policy("hbone", &json!([{"ports": [{"port": 15008}]}]));
    let printed = text(&agents.run(&explain).stdout);
    assert!(printed.contains("State       enrolled"), "{printed}");
    assert!(!printed.contains("Network policies"), "{printed}");
}
