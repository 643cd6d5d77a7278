use std::collections::BTreeSet;

use inpod_proto::podevents::v1::{
    Bind, BindChange, BindKind, BindWarning, PodBinds, PortBinds, PortProtocol,
};
use inpod_service::escape_controls;

use crate::{display, table::Table};

const HEADER: [&str; 8] = [
    "NAMESPACE",
    "NAME",
    "PORT",
    "SOURCE",
    "BOUND",
    "TO",
    "ENROLLED",
    "WARNING",
];

/// Renders the ports, followed by the pods that could not be inspected and by explanations of the changes and warnings.
/// An empty line ends the table: `kubectl inpod` aligns the tables of all nodes.
pub(super) fn text(pods: &[PodBinds]) -> String {
    let mut table = Table::new(&HEADER);
    for pod in pods {
        rows(pod).into_iter().for_each(|row| table.push(row));
    }
    let failures = pods.iter().filter_map(failure);
    let ports = || pods.iter().flat_map(|pod| &pod.ports);
    let changes: BTreeSet<_> = ports()
        .flat_map(PortBinds::changes)
        .map(explain_change)
        .collect();
    let warnings: BTreeSet<_> = ports()
        .flat_map(PortBinds::warnings)
        .map(explain_warning)
        .collect();
    let meanings = changes.into_iter().chain(warnings);
    let meanings = meanings.map(|(name, meaning)| format!("{name}: {meaning}\n"));
    let mut remarks = failures.chain(meanings).peekable();
    let mut text = table.take();
    if remarks.peek().is_some() {
        text.push('\n');
    }
    text.extend(remarks);
    text
}

fn rows(pod: &PodBinds) -> Vec<Vec<String>> {
    let who = pod.pod.clone().unwrap_or_default();
    let who = || vec![who.namespace.clone(), who.name.clone()];
    if pod.ports.is_empty() {
        let mut cells = vec![String::new(); HEADER.len() - 2];
        if let Some(bound) = cells.get_mut(2) {
            *bound = no_ports(pod);
        }
        return vec![[who(), cells].concat()];
    }
    let ports = pod.ports.iter();
    ports.map(|port| [who(), cells(port)].concat()).collect()
}

fn no_ports(pod: &PodBinds) -> String {
    match display::reason(pod.reason) {
        _ if pod.failure.is_some() => "unknown".to_owned(),
        reason if matches!(reason.as_str(), "HOST_NETWORK" | "POD_TERMINAL") => reason,
        _ => "nothing".to_owned(),
    }
}

fn cells(port: &PortBinds) -> Vec<String> {
    let protocol = match port.protocol() {
        PortProtocol::Udp => "UDP",
        PortProtocol::Tcp | PortProtocol::Unspecified => "TCP",
    };
    let changes = port
        .changes()
        .map(|it| explain_change(it).0)
        .collect::<Vec<_>>();
    let warnings = port.warnings().map(|it| explain_warning(it).0);
    let enrolled = if port.kind() == BindKind::Unspecified {
        "unknown".to_owned()
    } else if changes.is_empty() {
        "unchanged".to_owned()
    } else {
        changes.join(", ")
    };
    vec![
        format!("{}/{protocol}", port.port),
        source(port),
        format_kind(port.kind()).to_owned(),
        addresses(port),
        enrolled,
        warnings.collect::<Vec<_>>().join(", "),
    ]
}

/// Describes where the port was declared, for example `container (http), service web`.
fn source(port: &PortBinds) -> String {
    let names = match port.names.join(" ") {
        names if names.is_empty() => names,
        names => format!(" ({names})"),
    };
    let container = port.declared.then(|| format!("container{names}"));
    let services = port
        .services
        .iter()
        .map(|service| format!("service {service}"));
    let all = container.into_iter().chain(services);
    all.collect::<Vec<_>>().join(", ")
}

fn format_kind(kind: BindKind) -> &'static str {
    match kind {
        BindKind::Unspecified => "unknown",
        BindKind::Wildcard => "wildcard",
        BindKind::PodIp => "pod IP",
        BindKind::Other => "other",
        BindKind::Localhost => "localhost",
        BindKind::NotFound => "not found",
    }
}

/// Lists each address once, because a server may have a socket per thread (`SO_REUSEPORT`). The service returns the
/// addresses sorted.
fn addresses(port: &PortBinds) -> String {
    let mut addresses: Vec<_> = port.binds.iter().map(format_bind).collect();
    addresses.dedup();
    addresses.join(", ")
}

fn format_bind(bind: &Bind) -> String {
    let family = match (bind.address.as_str(), bind.ipv4) {
        ("::", false) => " (IPv6 only)",
        _ => "",
    };
    let interface = match bind.interface_index {
        0 => String::new(),
        index => format!(" on interface {index}"),
    };
    format!("{}{family}{interface}", bind.address)
}

fn explain_change(change: BindChange) -> (&'static str, &'static str) {
    match change {
        BindChange::Unspecified => ("unknown", "reported by a newer release of the service"),
        BindChange::Lost => (
            "lost",
            "unreachable in the mesh: the socket is bound to an interface, but ztunnel connects over the loopback interface. Bind it to the pod's address instead",
        ),
        BindChange::PortTaken => (
            "port-taken",
            "ztunnel needs the port: the pod cannot be enrolled while something listens on it",
        ),
    }
}

fn explain_warning(warning: BindWarning) -> (&'static str, &'static str) {
    match warning {
        BindWarning::Unspecified => ("unknown", "reported by a newer release of the service"),
        BindWarning::LocalhostForwardingMisses => (
            "localhost-forwarding-misses",
            "a sidecar that forwards to localhost (Istio's LOCALHOST mode) could not reach it; ztunnel, and Istio's sidecars since 1.10, can",
        ),
        BindWarning::LocalhostForwardingExposes => (
            "localhost-forwarding-exposes",
            "only a sidecar that forwards to localhost (Istio's LOCALHOST mode) would expose it; it stays unreachable without a mesh, and with ztunnel and Istio's sidecars since 1.10",
        ),
        BindWarning::FamilyMissing => (
            "family-missing",
            "nothing listens on one of the pod's address families; the same with and without a mesh",
        ),
    }
}

fn failure(pod: &PodBinds) -> Option<String> {
    let failure = pod.failure.as_ref()?;
    let who = pod.pod.clone().unwrap_or_default();
    let who = escape_controls(&format!("{}/{}", who.namespace, who.name));
    let (reason, message) = (
        display::reason(failure.reason),
        escape_controls(&failure.message),
    );
    let remedy = escape_controls(&failure.remedy);
    Some(format!(
        "{who}: {message} [{reason}]\n  What to do: {remedy}\n"
    ))
}

#[cfg(test)]
mod tests {
    use inpod_proto::types::v1::{Failure, PodRef, Reason};

    use super::*;

    fn pod(name: &str, ports: Vec<PortBinds>) -> PodBinds {
        PodBinds {
            pod: Some(PodRef {
                namespace: "shop".into(),
                name: name.into(),
                uid: "u".into(),
            }),
            ports,
            ..PodBinds::default()
        }
    }

    fn build_port(port: u32, kind: BindKind, address: &str) -> PortBinds {
        let bind = Bind {
            address: address.to_owned(),
            ..Bind::default()
        };
        PortBinds {
            protocol: PortProtocol::Tcp.into(),
            port,
            kind: kind.into(),
            binds: vec![bind],
            ..PortBinds::default()
        }
    }

    #[test]
    fn a_place_is_told_once_however_many_sockets_are_there() {
        let of = |address| build_port(80, BindKind::Wildcard, address).binds;
        let texts = ["0.0.0.0", "0.0.0.0", "0.0.0.0", "::"];
        let port = PortBinds {
            binds: texts.map(of).concat(),
            ..PortBinds::default()
        };
        assert_eq!(addresses(&port), "0.0.0.0, :: (IPv6 only)");
    }

    #[test]
    fn each_port_has_its_line_and_each_change_its_explanation() {
        let pods = [
            pod(
                "web",
                vec![
                    PortBinds {
                        declared: true,
                        names: vec!["http".into()],
                        services: vec!["web".into()],
                        ..build_port(80, BindKind::Wildcard, "::")
                    },
                    PortBinds {
                        changes: vec![BindChange::PortTaken.into()],
                        warnings: vec![BindWarning::FamilyMissing.into()],
                        ..build_port(15006, BindKind::PodIp, "10.0.0.2")
                    },
                ],
            ),
            pod("idle", vec![]),
            PodBinds {
                reason: Reason::HostNetwork.into(),
                ..pod("host", vec![])
            },
            PodBinds {
                failure: Some(Failure {
                    reason: Reason::NetnsMissing.into(),
                    message: "no\nsuch path".into(),
                    remedy: "wait".into(),
                    ..Failure::default()
                }),
                ..pod("gone", vec![])
            },
        ];
        let text = text(&pods);
        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines[..6],
            [
                "NAMESPACE NAME PORT SOURCE BOUND TO ENROLLED WARNING",
                "shop web 80/TCP container (http), service web wildcard :: (IPv6 only) unchanged -",
                "shop web 15006/TCP - pod IP 10.0.0.2 port-taken family-missing",
                "shop idle - - nothing - - -",
                "shop host - - HOST_NETWORK - - -",
                "shop gone - - unknown - - -",
            ]
        );
        assert_eq!(lines[6], "");
        assert_eq!(lines[7], "shop/gone: no\\nsuch path [NETNS_MISSING]");
        assert_eq!(lines[8], "What to do: wait");
        assert!(lines[9].starts_with("port-taken: ztunnel needs"), "{text}");
        assert!(
            lines[10].starts_with("family-missing: nothing listens"),
            "{text}"
        );
        assert_eq!(lines.len(), 11);
    }
}
