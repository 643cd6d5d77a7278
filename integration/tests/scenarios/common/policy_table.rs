//! The table of the install page: what network policies have to allow for a pod of the mesh.

use std::net::IpAddr;

const PAGE: &str = include_str!("../../../../deploy/docs/install.md");

/// An entry of a policy, which admits TCP connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// `ingress` or `egress`, from the view of the selected pod.
    pub(crate) direction: &'static str,
    /// `None` stands for every pod of the mesh.
    pub(crate) peer: Option<IpAddr>,
    /// `None` stands for the ports of the pod's probes.
    pub(crate) port: Option<u16>,
}

pub(crate) fn rows() -> Vec<Row> {
    PAGE.lines().filter_map(parse).collect()
}

fn parse(line: &'static str) -> Option<Row> {
    let cells: Vec<_> = line.split('|').map(str::trim).collect();
    let direction = ["ingress", "egress"]
        .into_iter()
        .find(|it| cells.get(1) == Some(it))?;
    let peer = match *cells.get(2)? {
        "every pod of the mesh" => None,
        address => Some(address.trim_matches('`').parse().unwrap()),
    };
    let port = match *cells.get(3)? {
        "the ports of the pod's probes" => None,
        port => Some(port.parse().unwrap()),
    };
    Some(Row {
        direction,
        peer,
        port,
    })
}
