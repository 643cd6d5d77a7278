use std::net::IpAddr;

use super::settings::{InterfaceName, Network};
use crate::{family::Family, marks::Mark};

/// A part of a rule. Conditions describe the packet. Anything not in this list is [`Expr::Unknown`] and never inpod's.
///
/// Rules keep the order of this list, in which `iptables-save` prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Is of this IP family.
    Version(Family),
    Source(Network),
    Destination(Network),
    /// Is of the network's family and goes elsewhere.
    DestinationNot(Network),
    /// Is of the family and goes to an address in the table's set.
    DestinationIn(Family, String),
    ArrivesBy(InterfaceName),
    LeavesBy(InterfaceName),
    NotLeavesBy(InterfaceName),
    Protocol(Transport),
    /// Only after [`Expr::Protocol`], as the next three.
    SourcePort(u16),
    Port(u16),
    PortNot(u16),
    /// Opens a TCP connection: of FIN, SYN, RST and ACK only SYN is set.
    TcpSyn,
    Marked(Mark),
    NotMarked(Mark),
    ConnectionMarked(Mark),
    /// First of its connection that conntrack sees.
    NewConnection,
    /// Of an established or related connection.
    KnownConnection,
    /// Belongs to no connection and cannot open one.
    InvalidConnection,
    /// Sent by a socket of this netns.
    FromAnySocket,
    /// Sent by a socket that the user opened.
    FromUser(u32),
    /// Sent by a socket that the group opened.
    FromGroup(u32),
    /// Sent by a socket that another group opened.
    NotFromGroup(u32),
    /// From a socket opened in the cgroup or below. Not allowed in
    /// postrouting (nft_socket_validate in net/netfilter/nft_socket.c).
    FromCgroup {
        /// Depth below the root cgroup.
        level: u32,
        /// Inode of the cgroup's directory.
        id: u64,
    },
    /// The connection's label, 0 to 127.
    Labelled(u8),
    Counter,
    /// Sets only the mark's bits, on the packet.
    Mark(Mark),
    /// Sets only the mark's bits, on the connection.
    MarkConnection(Mark),
    /// Labels the connection, 0 to 127.
    Label(u8),
    Zone(u16),
    /// No later rule of the chain sees it.
    Accept,
    Drop,
    Redirect(u16),
    SourceNat(IpAddr),
    /// Marks and delivers to the transparent socket on the port; without one, the next rule follows. With the family
    /// that the rule selects, if any.
    Tproxy(Option<Family>, u16, Mark),
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Udp,
}

impl Expr {
    /// Redirects to ztunnel or a sidecar's proxy.
    pub(crate) fn captures(&self) -> bool {
        matches!(self, Self::Redirect(_) | Self::Tproxy(..))
    }

    /// Requires this family, if any.
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
