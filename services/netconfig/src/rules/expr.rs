use std::net::IpAddr;

use crate::marks::Mark;

/// What a rule is made of. A closed list: what the kernel holds beyond it is [`Expr::Unknown`] and never ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Of the address's family, and not to that address.
    DestinationNot(IpAddr),
    /// Leaves by the interface of that name.
    LeavesBy(String),
    /// Is TCP.
    Tcp,
    /// Is not to that port. After [`Expr::Tcp`] only.
    PortNot(u16),
    /// The packet carries the mark.
    Marked(Mark),
    /// The packet does not carry the mark.
    NotMarked(Mark),
    /// The packet's connection carries the mark.
    ConnectionMarked(Mark),
    /// The packet begins a connection.
    NewConnection,
    /// Counts.
    Counter,
    /// Gives the packet the mark, in the mark's bits alone.
    Mark(Mark),
    /// Gives the packet's connection the mark, in the mark's bits alone.
    MarkConnection(Mark),
    /// The packet goes on; no later rule of the chain sees it.
    Accept,
    /// The connection goes to that port of this netns.
    Redirect(u16),
    /// Something else.
    Unknown(String),
}
