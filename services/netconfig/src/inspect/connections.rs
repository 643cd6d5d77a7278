//! The connections of a netns, identified by their endpoints.

use std::{collections::BTreeSet, net::SocketAddr};

use inpod_linux::Netns;

use super::{Proxies, diag, flows, tcp::Socket};
use crate::inspect::InspectError;

/// The local and remote endpoint of each connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Connections(BTreeSet<(SocketAddr, SocketAddr)>);

impl Connections {
    fn of<'a>(sockets: impl Iterator<Item = &'a Socket>) -> Self {
        let ends = sockets.map(|Socket { local, remote, .. }| (*local, *remote));
        Self(ends.collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn intersection(&self, others: &Self) -> Self {
        Self(&self.0 & &others.0)
    }

    /// Returns whether a connection has the two endpoints, in either direction.
    pub(crate) fn has(&self, one: SocketAddr, other: SocketAddr) -> bool {
        self.0.contains(&(one, other)) || self.0.contains(&(other, one))
    }
}

/// Returns current connections that bypass ztunnel or a sidecar.
pub(super) fn bypassing(netns: &Netns, proxies: &Proxies) -> Result<Connections, InspectError> {
    let sockets = diag::connections(netns)?;
    let bypassing = sockets
        .iter()
        .filter(|it| flows::bypasses_proxy(it, proxies));
    Ok(Connections::of(bypassing))
}

/// Returns all connections of ztunnel and of a sidecar's proxy.
pub(crate) fn proxied(netns: &Netns, proxies: &Proxies) -> Result<Connections, InspectError> {
    let sockets = diag::connections(netns)?;
    let proxied = sockets.iter().filter(|it| flows::is_proxied(it, proxies));
    Ok(Connections::of(proxied))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_the_same_from_either_end() {
        let [one, other, third] =
            ["10.9.0.1:80", "10.9.0.2:40000", "10.9.0.2:40001"].map(|end| end.parse().unwrap());
        let connections = Connections(BTreeSet::from([(one, other)]));
        assert!(connections.has(one, other) && connections.has(other, one));
        assert!(!connections.has(one, third));
    }
}
