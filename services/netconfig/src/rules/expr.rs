use std::net::IpAddr;

use super::{InterfaceName, Network};
use crate::{family::Family, marks::Mark};

/// A part of a rule. Conditions describe the packet. Any expression missing from the list below is
/// [`Expr::Unknown`] and never inpod's.
///
/// Rules keep the order of the list, in which `iptables-save` prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// The packet is of the IP family.
    Version(Family),
    Source(Network),
    Destination(Network),
    /// The packet is of the network's family and goes elsewhere.
    DestinationNot(Network),
    /// The packet is of the family and goes to an address in the table's set.
    DestinationIn(Family, String),
    /// The frame carries a packet from the address. Only tables of family bridge see frames.
    FrameFrom(IpAddr),
    /// The frame has two tags, and the second tag, of the EtherType, has VLAN 0, which receivers ignore.
    FrameTagged(u16),
    ArrivesBy(InterfaceName),
    LeavesBy(InterfaceName),
    NotLeavesBy(InterfaceName),
    Protocol(Transport),
    /// The source port, valid only after [`Expr::Protocol`], like the next three conditions.
    SourcePort(u16),
    Port(u16),
    PortNot(u16),
    /// The packet opens a TCP connection: of FIN, SYN, RST and ACK, only SYN is set.
    TcpSyn,
    Marked(Mark),
    NotMarked(Mark),
    ConnectionMarked(Mark),
    /// The socket that receives the packet does not carry the mark. Without a socket, the rule ends.
    ReceiverNotMarked(Mark),
    /// The packet is the first of its connection seen by conntrack.
    NewConnection,
    /// The packet belongs to an established or related connection.
    KnownConnection,
    /// The packet belongs to no connection and cannot open a connection.
    InvalidConnection,
    /// A socket of the netns sent the packet.
    FromAnySocket,
    /// A socket opened by the user sent the packet.
    FromUser(u32),
    /// A socket opened by the group sent the packet.
    FromGroup(u32),
    /// A socket opened by another group sent the packet.
    NotFromGroup(u32),
    Counter,
    /// Sets only the mark's bits, on the packet.
    Mark(Mark),
    /// Sets only the mark's bits, on the connection.
    MarkConnection(Mark),
    Zone(u16),
    /// Accepts the packet, which no later rule of the chain sees.
    Accept,
    Drop,
    /// Refuses the packet as a port without a listener does: a connection by a reset, a datagram by ICMP.
    Refuse(Transport),
    Redirect(u16),
    SourceNat(IpAddr),
    /// Marks packets and delivers them to the transparent socket on the port; without a socket, the next rule
    /// follows. The family is the one selected by the rule, if any.
    Tproxy(Option<Family>, u16, Mark),
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Udp,
}

impl Expr {
    /// Returns whether the expression redirects to ztunnel or a sidecar's proxy.
    pub(crate) fn captures(&self) -> bool {
        matches!(self, Self::Redirect(_) | Self::Tproxy(..))
    }

    /// Returns the family required by the expression, if any.
    pub(crate) fn family(&self) -> Option<Family> {
        match self {
            Self::Version(family) => Some(*family),
            Self::Source(network) | Self::Destination(network) | Self::DestinationNot(network) => {
                Some(Family::of_network(*network))
            }
            Self::DestinationIn(family, _) => Some(*family),
            Self::FrameFrom(address) => Some(Family::of(*address)),
            Self::FrameTagged(_)
            | Self::ArrivesBy(_)
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
            | Self::ReceiverNotMarked(_)
            | Self::NewConnection
            | Self::KnownConnection
            | Self::InvalidConnection
            | Self::FromAnySocket
            | Self::FromUser(_)
            | Self::FromGroup(_)
            | Self::NotFromGroup(_)
            | Self::Counter
            | Self::Mark(_)
            | Self::MarkConnection(_)
            | Self::Zone(_)
            | Self::Accept
            | Self::Drop
            | Self::Refuse(_)
            | Self::Redirect(_)
            | Self::SourceNat(_)
            | Self::Tproxy(..)
            | Self::Unknown(_) => None,
        }
    }
}
