//! What a pod's applications bind, and what enrollment changes about who reaches them.
//!
//! Without a mesh a connection arrives at the pod's interface. In the mesh ztunnel takes it and connects to the same
//! address and port from within the pod's netns, so that it arrives at loopback's. An address is therefore reached with
//! the mesh exactly where it is reached without; what differs is a socket that is bound to the pod's interface.

mod judge;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use inpod_proto::{Invalid, netconfig::v1 as netconfig, podevents::v1 as wire};

use crate::pod::DeclaredPort;

/// What a port speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port of a pod.
pub(crate) type Port = (Protocol, u16);

/// A socket that takes what comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) port: Port,
    /// What it is bound to; unspecified for every address.
    pub(crate) address: IpAddr,
    /// Whether it takes IPv4 too, of an IPv6 socket.
    pub(crate) dual_stack: bool,
    pub(crate) uid: u32,
    /// The index of the interface that it is bound to, if it is.
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

/// What ztunnel has to do with the ports that it listens on in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ztunnel {
    /// Nothing: the pod has a proxy of its own.
    Never,
    /// It would need them.
    Needs,
    /// It has them, or is just taking or leaving them.
    Has,
}

/// A pod, as far as it matters to its sockets.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The pod's addresses.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ztunnel: Ztunnel,
}

/// Who speaks of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    declared: bool,
    names: BTreeSet<String>,
    services: BTreeSet<String>,
}

/// The ports that are spoken of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spoken(BTreeMap<Port, Said>);

impl Spoken {
    /// A container declares it.
    pub(crate) fn declare(&mut self, port: &DeclaredPort) {
        let said = self.0.entry((port.protocol, port.port)).or_default();
        said.declared = true;
        said.names.extend(port.name.clone());
    }

    /// A Service leads to it.
    pub(crate) fn lead(&mut self, port: Port, service: &str) {
        let said = self.0.entry(port).or_default();
        said.services.insert(service.to_owned());
    }

    /// The ports of a pod that could not be looked into.
    pub(crate) fn unseen(self) -> Vec<wire::PortBinds> {
        let all = self.0.into_iter();
        all.map(|(port, said)| judge::spoken_of(port, said))
            .collect()
    }

    /// The ports that are spoken of or listened on.
    pub(crate) fn seen(mut self, sockets: Vec<Socket>, place: &Place) -> Vec<wire::PortBinds> {
        let mut by_port: BTreeMap<Port, Vec<Socket>> = BTreeMap::new();
        for socket in sockets {
            by_port.entry(socket.port).or_default().push(socket);
        }
        if place.ztunnel == Ztunnel::Has {
            by_port.retain(|port, _| !judge::is_ztunnels(*port));
        }
        for port in by_port.keys() {
            self.0.entry(*port).or_default();
        }
        let all = self.0.into_iter();
        all.map(|(port, said)| {
            let sockets = by_port.remove(&port).unwrap_or_default();
            judge::port(port, said, &sockets, place)
        })
        .collect()
    }
}

#[cfg(test)]
mod tests;
