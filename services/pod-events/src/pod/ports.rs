//! The ports that a pod's containers declare.

use k8s_openapi::api::core::v1 as k8s;

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
}
