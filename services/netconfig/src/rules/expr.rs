use std::net::IpAddr;

use super::settings::{InterfaceName, Network};
use crate::{family::Family, marks::Mark};

/// A part of a rule. The list is closed: anything else in the kernel is [`Expr::Unknown`] and never inpod's.
///
/// The expressions of a rule are in the order of this list, in which `iptables-save` prints them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// The packet is of the family.
    Version(Family),
    /// The packet comes from the network.
    Source(Network),
    /// The packet goes to the network.
    Destination(Network),
    /// The packet is of the network's family and does not go to the network.
    DestinationNot(Network),
    /// The packet is of the family, and the set of the same table contains its destination.
    DestinationIn(Family, String),
    /// The packet arrives by the interface.
    ArrivesBy(InterfaceName),
    /// The packet leaves by the interface.
    LeavesBy(InterfaceName),
    /// The packet does not leave by the interface.
    NotLeavesBy(InterfaceName),
    /// The packet has the protocol.
    Protocol(Transport),
    /// The packet comes from the port. Only after [`Expr::Protocol`], as the next three.
    SourcePort(u16),
    /// The packet goes to the port.
    Port(u16),
    /// The packet does not go to the port.
    PortNot(u16),
    /// The packet opens a TCP connection: of FIN, SYN, RST and ACK it has only SYN.
    TcpSyn,
    /// The packet has the mark.
    Marked(Mark),
    /// The packet does not have the mark.
    NotMarked(Mark),
    /// The packet's connection has the mark.
    ConnectionMarked(Mark),
    /// The packet is the first of its connection that conntrack sees.
    NewConnection,
    /// The packet belongs to an established connection or is related to one.
    KnownConnection,
    /// The packet belongs to no connection and cannot open one.
    InvalidConnection,
    /// A socket of this netns sends the packet.
    FromAnySocket,
    /// A socket of this netns sends the packet, and the user opened it.
    FromUser(u32),
    /// A socket of this netns sends the packet, and the group opened it.
    FromGroup(u32),
    /// A socket of this netns sends the packet, and another group opened it.
    NotFromGroup(u32),
    /// The packet's socket was opened in the cgroup or below it. Not allowed in
    /// postrouting (nft_socket_validate in net/netfilter/nft_socket.c).
    FromCgroup {
        /// The cgroup's depth below the root.
        level: u32,
        /// The inode number of the cgroup's directory.
        id: u64,
    },
    /// The packet's connection has the label, 0 to 127.
    Labelled(u8),
    /// Counts the packets that match.
    Counter,
    /// Sets the mark's bits of the packet's mark, keeping all others.
    Mark(Mark),
    /// Sets the mark's bits of the connection's mark, keeping all others.
    MarkConnection(Mark),
    /// Adds the label, 0 to 127, to the packet's connection.
    Label(u8),
    /// Tracks the packet's connection in a conntrack zone of its own.
    Zone(u16),
    /// Accepts the packet: no later rule of the chain sees it.
    Accept,
    Drop,
    /// Redirects the connection to a local port.
    Redirect(u16),
    /// Rewrites the connection's source address.
    SourceNat(IpAddr),
    /// Marks the packet and delivers it to the transparent socket on the port. Continues with the next rule if there is
    /// none. The family is the one that the rule selects, if any.
    Tproxy(Option<Family>, u16, Mark),
    /// Any other expression, as text.
    Unknown(String),
}

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Udp,
}

impl Expr {
    /// Returns whether the expression redirects packets to ztunnel or a sidecar's proxy.
    pub(crate) fn captures(&self) -> bool {
        matches!(self, Self::Redirect(_) | Self::Tproxy(..))
    }

    /// Returns the family that the expression requires, if any.
    pub(crate) fn family(&self) -> Option<Family> {
        match self {
            Self::Version(family) => Some(*family),
            Self::Source(network) | Self::Destination(network) | Self::DestinationNot(network) => {
                Some(network.family())
            }
            Self::DestinationIn(family, _) => Some(*family),
            Self::ArrivesBy(_)
            | Self::LeavesBy(_)
            | Self::NotLeavesBy(_)
            | Self::Protocol(_)
            | Self::SourcePort(_)
            | Self::Port(_)
            | Self::PortNot(_)
            | Self::TcpSyn
            | Self::Marked(_)
            | Self::NotMarked(_)
            | Self::ConnectionMarked(_)
            | Self::NewConnection
            | Self::KnownConnection
            | Self::InvalidConnection
            | Self::FromAnySocket
            | Self::FromUser(_)
            | Self::FromGroup(_)
            | Self::NotFromGroup(_)
            | Self::FromCgroup { .. }
            | Self::Labelled(_)
            | Self::Counter
            | Self::Mark(_)
            | Self::MarkConnection(_)
            | Self::Label(_)
            | Self::Zone(_)
            | Self::Accept
            | Self::Drop
            | Self::Redirect(_)
            | Self::SourceNat(_)
            | Self::Tproxy(..)
            | Self::Unknown(_) => None,
        }
    }
}
