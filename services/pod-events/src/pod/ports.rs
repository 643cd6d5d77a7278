//! The declared ports of a pod's containers, and the ports of the kubelet's probes.

use std::{collections::BTreeSet, num::NonZeroU16};

use k8s_openapi::{api::core::v1 as k8s, apimachinery::pkg::util::intstr::IntOrString};

pub use inpod_proto::podevents::v1::PortProtocol as Protocol;

/// Informational only: the container may listen on others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeclaredPort {
    pub protocol: Protocol,
    /// The number, at least 1.
    pub port: u16,
    pub name: Option<String>,
}

/// Returns the ports of all containers that run alongside the application, including init containers that restart
/// always. Ignores invalid ports and protocols other than TCP and UDP.
pub(super) fn declared(spec: &k8s::PodSpec) -> Vec<DeclaredPort> {
    let beside = |init: &&k8s::Container| init.restart_policy.as_deref() == Some("Always");
    let inits = spec.init_containers.iter().flatten().filter(beside);
    let containers = spec.containers.iter().chain(inits);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports.filter_map(parse_port).collect()
}

fn parse_port(port: &k8s::ContainerPort) -> Option<DeclaredPort> {
    let number = u16::try_from(port.container_port).ok();
    Some(DeclaredPort {
        protocol: match port.protocol.as_deref() {
            None | Some("TCP") => Protocol::Tcp,
            Some("UDP") => Protocol::Udp,
            Some(_) => return None,
        },
        port: number.filter(|number| *number > 0)?,
        name: port.name.clone(),
    })
}

/// The maximum of probed ports, because each takes two rules in the pod.
const MAX_PROBED: usize = 16;

/// Returns the TCP ports of probes and lifecycle hooks, both called by the kubelet, or `None` if there are too many. After
/// a call by HTTP, a kubelet follows redirects to other ports of the pod, presumably declared ports.
pub(super) fn probed(spec: &k8s::PodSpec) -> Option<BTreeSet<NonZeroU16>> {
    let inits = spec.init_containers.iter().flatten();
    let containers = || spec.containers.iter().chain(inits.clone());
    let mut ports: BTreeSet<_> = containers().flat_map(called_ports).collect();
    if containers().any(|it| http_calls(it).next().is_some()) {
        let declared = declared(spec).into_iter();
        let declared = declared.filter(|it| it.protocol == Protocol::Tcp);
        ports.extend(declared.filter_map(|it| NonZeroU16::new(it.port)));
    }
    (ports.len() <= MAX_PROBED).then_some(ports)
}

fn called_ports(container: &k8s::Container) -> impl Iterator<Item = NonZeroU16> {
    let grpc = probes(container).filter_map(|probe| to_port(probe.grpc.as_ref()?.port));
    let by_probes = probes(container).filter_map(|probe| probe.tcp_socket.as_ref());
    let by_hooks = hooks(container).filter_map(|hook| hook.tcp_socket.as_ref());
    let tcp = by_probes.chain(by_hooks).map(|socket| &socket.port);
    let named = http_calls(container).map(|get| &get.port).chain(tcp);
    named
        .filter_map(|port| resolve(container, port))
        .chain(grpc)
}

fn http_calls(container: &k8s::Container) -> impl Iterator<Item = &k8s::HTTPGetAction> {
    let by_probes = probes(container).filter_map(|probe| probe.http_get.as_ref());
    by_probes.chain(hooks(container).filter_map(|hook| hook.http_get.as_ref()))
}

fn probes(container: &k8s::Container) -> impl Iterator<Item = &k8s::Probe> {
    let probes = [
        &container.liveness_probe,
        &container.readiness_probe,
        &container.startup_probe,
    ];
    probes.into_iter().flatten()
}

fn hooks(container: &k8s::Container) -> impl Iterator<Item = &k8s::LifecycleHandler> {
    let hooks = container.lifecycle.iter();
    let hooks = hooks.flat_map(|hooks| [&hooks.post_start, &hooks.pre_stop]);
    hooks.flatten()
}

/// Returns the number of a port with a name of the container's or a number in text
/// (ResolveContainerPort in pkg/probe/util.go of Kubernetes).
fn resolve(container: &k8s::Container, port: &IntOrString) -> Option<NonZeroU16> {
    match port {
        IntOrString::Int(number) => to_port(*number),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let named = ports.find(|port| port.name.as_ref() == Some(name));
            named.map_or_else(|| name.parse().ok(), |port| to_port(port.container_port))
        }
    }
}

fn to_port(number: i32) -> Option<NonZeroU16> {
    u16::try_from(number).ok().and_then(NonZeroU16::new)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tcp_and_udp_ports_of_containers_and_sidecars_are_declared() {
        let spec = json!({
            "containers": [
                {"name": "a", "ports": [{"containerPort": 80, "name": "http"}]},
                {"name": "b", "ports": [
                    {"containerPort": 53, "protocol": "UDP"},
                    {"containerPort": 9, "protocol": "SCTP"},
                    {"containerPort": 0},
                    {"containerPort": 70_000},
                    {"containerPort": -1},
                ]},
            ],
            "initContainers": [
                {"name": "c", "restartPolicy": "Always", "ports": [{"containerPort": 81, "protocol": "TCP"}]},
                {"name": "d", "ports": [{"containerPort": 82}]},
            ],
        });
        let spec: k8s::PodSpec = serde_json::from_value(spec).unwrap();
        let found = declared(&spec).into_iter().map(|it| (it.port, it.protocol));
        let expected = [
            (80, Protocol::Tcp),
            (53, Protocol::Udp),
            (81, Protocol::Tcp),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    fn probed_ports(spec: serde_json::Value) -> Option<Vec<u16>> {
        let ports = probed(&serde_json::from_value(spec).unwrap())?;
        Some(ports.into_iter().map(NonZeroU16::get).collect())
    }

    #[test]
    fn ports_of_probes_and_hooks_are_probed() {
        let spec = json!({
            "containers": [
                {
                    "name": "a",
                    "ports": [{"containerPort": 81, "name": "http"}],
                    "livenessProbe": {"httpGet": {"port": "http"}},
                    "readinessProbe": {"tcpSocket": {"port": 82}},
                    "startupProbe": {"grpc": {"port": 83}},
                    "lifecycle": {
                        "postStart": {"httpGet": {"port": "84"}},
                        "preStop": {"tcpSocket": {"port": 85}},
                    },
                },
                {
                    "name": "b",
                    "livenessProbe": {"exec": {"command": ["true"]}},
                    // The name is another container's, and the numbers are none.
                    "readinessProbe": {"httpGet": {"port": "http"}},
                    "startupProbe": {"httpGet": {"port": 0}},
                    "lifecycle": {"preStop": {"httpGet": {"port": 65536}}},
                },
            ],
            "initContainers": [
                {"name": "c", "restartPolicy": "Always", "readinessProbe": {"tcpSocket": {"port": 86}}},
            ],
        });
        assert_eq!(probed_ports(spec), Some(vec![81, 82, 83, 84, 85, 86]));
        assert_eq!(
            probed_ports(json!({"containers": [{"name": "a"}]})),
            Some(vec![])
        );
    }

    #[test]
    fn declared_ports_are_probed_if_a_redirect_can_lead_there() {
        let spec = |probe: serde_json::Value| {
            let ports = json!([{"containerPort": 8443}, {"containerPort": 53, "protocol": "UDP"}]);
            json!({"containers": [{"name": "a", "livenessProbe": probe}, {"name": "b", "ports": ports}]})
        };
        let by_http = spec(json!({"httpGet": {"port": 8080}}));
        assert_eq!(probed_ports(by_http), Some(vec![8080, 8443]));
        let by_tcp = spec(json!({"tcpSocket": {"port": 8080}}));
        assert_eq!(probed_ports(by_tcp), Some(vec![8080]));
    }

    #[test]
    fn too_many_ports_of_probes_count_as_all() {
        let spec = |containers: u16| {
            let container = |at| json!({"name": "a", "livenessProbe": {"tcpSocket": {"port": at}}});
            json!({"containers": (1..=containers).map(container).collect::<Vec<_>>()})
        };
        assert_eq!(probed_ports(spec(16)).map(|ports| ports.len()), Some(16));
        assert_eq!(probed_ports(spec(17)), None);
    }
}
