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
    use super::*;

    fn with(ports: &[(i32, Option<&str>, Option<&str>)], restart: Option<&str>) -> k8s::Container {
        let port =
            |(number, protocol, name): &(i32, Option<&str>, Option<&str>)| k8s::ContainerPort {
                container_port: *number,
                protocol: protocol.map(str::to_owned),
                name: name.map(str::to_owned),
                ..k8s::ContainerPort::default()
            };
        k8s::Container {
            ports: Some(ports.iter().map(port).collect()),
            restart_policy: restart.map(str::to_owned),
            ..k8s::Container::default()
        }
    }

    #[test]
    fn ports_are_those_of_containers_and_of_init_containers_that_go_on() {
        let spec = k8s::PodSpec {
            containers: vec![with(
                &[(80, None, Some("http")), (53, Some("UDP"), None)],
                None,
            )],
            init_containers: Some(vec![
                with(&[(81, Some("TCP"), None)], Some("Always")),
                with(&[(82, None, None)], None),
            ]),
            ..k8s::PodSpec::default()
        };
        let found: Vec<_> = declared(&spec)
            .into_iter()
            .map(|it| (it.port, it.protocol))
            .collect();
        let wanted = [
            (80, Protocol::Tcp),
            (53, Protocol::Udp),
            (81, Protocol::Tcp),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn what_is_no_port_of_tcp_or_udp_is_left_out() {
        let odd = with(
            &[
                (0, None, None),
                (70_000, None, None),
                (-1, None, None),
                (9, Some("SCTP"), None),
            ],
            None,
        );
        let spec = k8s::PodSpec {
            containers: vec![odd],
            ..k8s::PodSpec::default()
        };
        assert_eq!(declared(&spec), []);
    }
}
