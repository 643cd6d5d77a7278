use std::net::IpAddr;

use super::settings::{InterfaceName, Network};
use crate::{family::Family, marks::Mark};

/// What a rule is made of. A closed list: what the kernel holds beyond it is [`Expr::Unknown`] and never ours.
///
/// In a rule they stand in the order of this list, which is the order in which `iptables-save` prints them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Is of that family.
    Version(Family),
    /// Comes from there.
    Source(Network),
    /// Goes there.
    Destination(Network),
    /// Of the network's family, and does not go there.
    DestinationNot(Network),
    /// Is of that family and goes to an address of that set of the same table.
    DestinationIn(Family, String),
    /// Arrives by that interface.
    ArrivesBy(InterfaceName),
    /// Leaves by that interface.
    LeavesBy(InterfaceName),
    /// Does not leave by that interface.
    NotLeavesBy(InterfaceName),
    /// Is of that protocol.
    Protocol(Transport),
    /// Comes from that port. After [`Expr::Protocol`] only, as the next three.
    SourcePort(u16),
    /// Goes to that port.
    Port(u16),
    /// Does not go to that port.
    PortNot(u16),
    /// Begins a TCP connection: of the flags fin, syn, rst and ack, syn alone.
    TcpSyn,
    /// The packet carries the mark.
    Marked(Mark),
    /// The packet does not carry the mark.
    NotMarked(Mark),
    /// The packet's connection carries the mark.
    ConnectionMarked(Mark),
    /// The packet is the first that is seen of its connection.
    NewConnection,
    /// The packet belongs to a connection that is known, or to one related to it.
    KnownConnection,
    /// The packet belongs to no connection, and begins none.
    InvalidConnection,
    /// A socket of this netns sends the packet.
    FromAnySocket,
    /// A socket of this netns sends the packet, opened by that user.
    FromUser(u32),
    /// A socket of this netns sends the packet, opened by that group.
    FromGroup(u32),
    /// A socket of this netns sends the packet, opened by another group.
    NotFromGroup(u32),
    /// The packet's socket was opened in the cgroup with that id, or below it. The level is the cgroup's depth. Not
    /// where packets are about to leave (nft_socket_validate in net/netfilter/nft_socket.c).
    FromCgroup {
        /// How many directories the cgroup is below the root.
        level: u32,
        /// The inode number of the cgroup's directory.
        id: u64,
    },
    /// The packet's connection carries that label, a number up to 127.
    Labelled(u8),
    /// Counts.
    Counter,
    /// Gives the packet the mark, in the mark's bits alone.
    Mark(Mark),
    /// Gives the packet's connection the mark, in the mark's bits alone.
    MarkConnection(Mark),
    /// Gives the packet's connection that label, a number up to 127, beside those that it has.
    Label(u8),
    /// The packet's connection is tracked in that zone, apart from all others.
    Zone(u16),
    /// The packet goes on; no later rule of the chain sees it.
    Accept,
    /// The packet is gone.
    Drop,
    /// The connection goes to that port of this netns.
    Redirect(u16),
    /// The connection comes from that address, as seen from where it goes.
    SourceNat(IpAddr),
    /// The packet goes to the transparent socket on that port, with the mark, and no later rule of the chain sees it.
    /// Where there is no such socket: the next rule. Of the family that the rule demands, if it demands one.
    Tproxy(Option<Family>, u16, Mark),
    /// Something else.
    Unknown(String),
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Expr {
    /// Whether it leads packets to ztunnel, or to a sidecar's proxy.
    pub(crate) fn captures(&self) -> bool {
        matches!(self, Self::Redirect(_) | Self::Tproxy(..))
    }

    /// The family that packets must be of, where the expression demands one.
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
