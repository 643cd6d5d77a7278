//! Reads the rules of nf_tables as a whole and replaces them in one transaction, over netlink.

mod change;
mod constants;
mod decode;
mod encode;
pub(crate) mod leftovers;
mod lift;
mod lower;
mod observed;
mod op;
mod read;
mod script;
mod sets;

pub(crate) use decode::{ESTABLISHED_MATCH, MARK_TARGET};
pub(crate) use leftovers::Author;
pub(crate) use lower::{SYN as TCP_SYN, destination_of, ether_type_of, protocol_family};
pub(crate) use observed::{Change, NewTable, Observed, ObservedTable};
pub(crate) use op::{Base, Ct, Meta, Op};
#[cfg(test)]
pub(crate) use read::MAX_RULES;
pub(crate) use read::{ChainOutline, NamedTable, TableOutline, TableState};
pub(crate) use script::script;
pub(crate) use sets::{AddressSet, Edit};

use std::io;

use nix::sys::socket::SockProtocol;

use crate::netlink::{KernelError, Socket};

/// The size of a transaction with ten thousand set elements that have the longest comments.
const MAX_TRANSACTION_BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct Nftables {
    pub(crate) socket: Socket,
    has_deleted: bool,
}

impl Nftables {
    /// Opens a socket in the calling thread's netns. Other threads can use the socket from any netns.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            socket: Socket::open(SockProtocol::NetlinkNetFilter)?,
            has_deleted: false,
        })
    }

    /// Opens a socket for long use and large transactions.
    pub(crate) fn open_persistent() -> io::Result<Self> {
        let opened = Self::open()?;
        opened.socket.set_send_buffer(MAX_TRANSACTION_BYTES)?;
        Ok(opened)
    }

    /// Closes the socket in another thread after a deletion, because close(2) then waits tens of milliseconds until
    /// the kernel has freed the objects. New threads start and stay in netconfig's own netns.
    pub(crate) fn close(self) {
        if self.has_deleted {
            let closing = std::thread::Builder::new().spawn(move || drop(self));
            // If no thread can be started, the socket closes on the current thread.
            drop(closing);
        }
    }
}

impl Nftables {
    /// Applies a change if nothing has changed since `generation` was read; otherwise the error is a race.
    pub(crate) fn change(&mut self, generation: u32, change: &Change) -> Result<(), KernelError> {
        self.has_deleted |= change.deletes();
        change::change(&mut self.socket, generation, change)
    }
}
