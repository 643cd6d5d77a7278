//! Pods with one address family.

use std::net::IpAddr;

use integration::{App, Call, PluginCall};
use serde_json::{Value, json};

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn address(self, pod: &Pod) -> IpAddr {
        match self {
            Self::V4 => pod.v4.into(),
            Self::V6 => pod.v6.into(),
        }
    }

    /// Leaves the sandbox with this family, as its CNI chain does on a node of one family.
    fn alone_in(self, pod: &Pod) {
        let commands: &[&[&str]] = match self {
            Self::V4 => &[&["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"]],
            Self::V6 => &[&["ip", "-4", "addr", "flush", "dev", "eth0"]],
        };
        for command in commands {
            pod.exec(command).unwrap();
        }
    }

    /// Prepares the ADD with the result of that chain.
    fn add<'a>(self, deployed: &'a DeployedNode, pod: &Pod) -> PluginCall<'a> {
        let call = deployed.node.call(Call::add, pod);
        let stdin: Value = serde_json::from_str(&call.stdin).unwrap();
        let mut result = stdin["prevResult"].clone();
        let ips = result["ips"].as_array_mut().unwrap();
        let address = self.address(pod).to_string();
        ips.retain(|ip| ip["address"].as_str().unwrap().starts_with(&address));
        assert_eq!(ips.len(), 1, "{result}");
        let call = call.with_key("prevResult", result);
        deployed.plugin_call(deployed.program("inpod-cni"), call)
    }
}

/// Pods of one family join at their start and, running, by their label; they are captured and leave.
fn pods_of(family: Family) {
    let deployed = running();
    let all = [Mesh::Inside, Mesh::Outside, Mesh::Outside];
    let pods = deployed.sandboxes(&all).unwrap();
    for pod in &pods {
        family.alone_in(pod);
        family.add(&deployed, pod).succeed().unwrap();
    }
    let processes = pods.iter().map(Inhabitant::of);
    let _processes: Vec<_> = processes.collect::<Result<_, _>>().unwrap();
    let _apps: Vec<_> = pods
        .iter()
        .map(|pod| App::start(&pod.netns, PORT).unwrap())
        .collect();
    let (inside, late, outsider) = (&pods[0], &pods[1], &pods[2]);
    let path = |from: &Pod, to: &Pod| {
        let to = SocketAddr::new(family.address(to), PORT);
        let (path, source) = follow(&deployed, &from.netns, to);
        assert_eq!(source, family.address(from).to_string());
        path.into_iter().map(|(_, port)| port).collect::<Vec<_>>()
    };
    deployed.node.until_whole(&inside.spec).unwrap();
    assert_eq!(path(inside, outsider), [15001]);
    assert_eq!(path(outsider, inside), [15006]);
    assert_eq!(path(outsider, late), [0; 0]);
    assert_eq!(late.traces().unwrap(), NOTHING);
    let label = |mode: Value| {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": mode}}});
        let path = deployed.pod_path(&late.spec.name);
        deployed.server.patch(&path, &change).unwrap();
    };
    label(json!("ambient"));
    deployed.node.until_whole(&late.spec).unwrap();
    assert_eq!(path(inside, late), [15001, 15006]);
    label(Value::Null);
    let out = deployed.node.until(&late.spec, PodState::Out, TIMEOUT);
    out.unwrap();
    assert_eq!(late.traces().unwrap(), NOTHING);
    assert_eq!(path(inside, late), [15001]);
}

#[test]
fn pods_with_ipv4_only_join_are_captured_and_leave() {
    pods_of(Family::V4);
}

#[test]
fn pods_with_ipv6_only_join_are_captured_and_leave() {
    pods_of(Family::V6);
}
