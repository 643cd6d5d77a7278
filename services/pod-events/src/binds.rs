//! The sockets that a pod's applications bind, and how enrollment changes who can reach them.
//!
//! Without a mesh, a connection arrives at the pod's interface. In the mesh, ztunnel accepts it and connects
//! to the same address and port from within the pod's netns, through loopback. Only sockets bound to the
//! pod's interface behave differently.

mod classify;

use std::{collections::BTreeMap, net::IpAddr};

use inpod_proto::{Invalid, netconfig::v1 as netconfig, podevents::v1 as wire};

use crate::pod::{DeclaredPort, Protocol};

pub(crate) type Port = (Protocol, u16);

/// A listening TCP socket or a bound UDP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) port: Port,
    /// Unspecified for a wildcard bind.
    pub(crate) address: IpAddr,
    /// True if an IPv6 socket accepts IPv4 as well.
    pub(crate) dual_stack: bool,
    pub(crate) uid: u32,
    pub(crate) interface: Option<u32>,
}

impl TryFrom<netconfig::Listener> for Socket {
    type Error = Invalid;

    fn try_from(listener: netconfig::Listener) -> Result<Self, Invalid> {
        let protocol = match listener.protocol() {
            netconfig::Protocol::Tcp => Protocol::Tcp,
            netconfig::Protocol::Udp => Protocol::Udp,
            netconfig::Protocol::Unspecified => {
                return Err(Invalid::new("protocol", "it is neither TCP nor UDP"));
            }
        };
        let port = u16::try_from(listener.port).map_err(|error| Invalid::new("port", error))?;
        let address = listener.address.parse();
        Ok(Self {
            port: (protocol, port),
            address: address.map_err(|error| Invalid::new("address", error))?,
            dual_stack: listener.dual_stack,
            uid: listener.uid,
            interface: Some(listener.interface_index).filter(|index| *index != 0),
        })
    }
}

/// The state of ztunnel's own ports in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ztunnel {
    /// Never listens: the pod has a sidecar.
    Never,
    /// Would listen if the pod were enrolled.
    Needs,
    /// Listens, or is about to start or stop.
    Has,
}

#[derive(Clone, Debug)]
pub(crate) struct PodNetwork {
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ztunnel: Ztunnel,
}

/// The ports that containers declare or Services target.
#[derive(Clone, Debug, Default)]
pub(crate) struct PortIndex(BTreeMap<Port, wire::PortBinds>);

impl PortIndex {
    pub(crate) fn add_container_port(&mut self, port: &DeclaredPort) {
        let references = self.entry((port.protocol, port.port));
        references.declared = true;
        if let Some(name) = &port.name {
            insert_sorted(&mut references.names, name);
        }
    }

    pub(crate) fn add_service(&mut self, port: Port, service: &str) {
        insert_sorted(&mut self.entry(port).services, service);
    }

    fn entry(&mut self, port: Port) -> &mut wire::PortBinds {
        self.0.entry(port).or_insert_with(|| wire::PortBinds {
            protocol: port.0.into(),
            port: port.1.into(),
            ..wire::PortBinds::default()
        })
    }

    /// Returns the ports of a pod that could not be inspected.
    pub(crate) fn without_sockets(self) -> Vec<wire::PortBinds> {
        self.0.into_values().collect()
    }

    /// Returns the ports that are referred to or bound.
    pub(crate) fn with_sockets(
        mut self,
        mut sockets: Vec<Socket>,
        network: &PodNetwork,
    ) -> Vec<wire::PortBinds> {
        if network.ztunnel == Ztunnel::Has {
            sockets.retain(|socket| !classify::is_ztunnel_port(socket.port));
        }
        let mut by_port: BTreeMap<Port, Vec<Socket>> = BTreeMap::new();
        for socket in sockets {
            self.entry(socket.port);
            by_port.entry(socket.port).or_default().push(socket);
        }
        let all = self.0.into_iter();
        all.map(|(port, references)| {
            let sockets = by_port.remove(&port).unwrap_or_default();
            classify::classify_port(port, references, sockets, network)
        })
        .collect()
    }
}

/// Inserts a name into a sorted list, unless the list has the name.
fn insert_sorted(names: &mut Vec<String>, name: &str) {
    if let Err(at) = names.binary_search_by(|known| known.as_str().cmp(name)) {
        names.insert(at, name.to_owned());
    }
}

#[cfg(test)]
mod tests;
