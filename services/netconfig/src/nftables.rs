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

pub(crate) use leftovers::Author;
pub(crate) use observed::{Change, NewTable, Observed, ObservedTable};
pub(crate) use read::{ChainOutline, NamedTable, TableOutline, TableState};
pub(crate) use script::script;
pub(crate) use sets::{AddressSet, Edit};

use std::io;

use nix::sys::socket::SockProtocol;

use crate::{
    conntrack,
    family::Family,
    inspect::Connections,
    netlink::{KernelError, Socket},
};

/// The size of a transaction with ten thousand set elements that have the longest comments.
const MAX_TRANSACTION_BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct Nftables {
    socket: Socket,
    has_deleted: bool,
}

impl Nftables {
    /// Opens a socket in the calling thread's netns. Other threads can use the socket from any netns.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            socket: Socket::open_own(SockProtocol::NetlinkNetFilter)?,
            has_deleted: false,
        })
    }

    /// Opens a socket for long use and large transactions.
    pub(crate) fn open_persistent() -> io::Result<Self> {
        let opened = Self {
            socket: Socket::open(SockProtocol::NetlinkNetFilter)?,
            has_deleted: false,
        };
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
    /// Deletes conntrack entries of stale DNS queries, given the families whose queries go to ztunnel.
    pub(crate) fn flush_dns(&mut self, captured: &[Family]) -> Result<(), KernelError> {
        conntrack::flush_dns(&mut self.socket, captured)
    }

    /// Deletes untranslated conntrack entries of families without rules, except entries of proxies.
    pub(crate) fn flush_untranslated(
        &mut self,
        families: &[Family],
        proxied: &Connections,
    ) -> Result<(), KernelError> {
        conntrack::flush_untranslated(&mut self.socket, families, proxied)
    }

    /// Deletes conntrack entries older than the rules, except entries of proxies.
    pub(crate) fn flush_existing(
        &mut self,
        families: &[Family],
        unclosed: &Connections,
        proxied: &Connections,
    ) -> Result<(), KernelError> {
        conntrack::flush_existing(&mut self.socket, families, unclosed, proxied)
    }

    /// Deletes conntrack entries of connections that ztunnel accepted or opened.
    pub(crate) fn flush_captured(&mut self, families: &[Family]) -> Result<(), KernelError> {
        conntrack::flush_captured(&mut self.socket, families)
    }
}

impl Nftables {
    /// Reads inpod's tables, and the foreign rules that inpod replaces.
    pub(crate) fn read(&mut self) -> Result<Observed, KernelError> {
        read::read(&mut self.socket)
    }

    /// Reads all tables that see IP packets, with their chains.
    pub(crate) fn read_chains(&mut self) -> Result<Vec<TableOutline>, KernelError> {
        read::read_outlines(&mut self.socket)
    }

    /// Applies a change if nothing has changed since `generation` was read; otherwise the error is a race.
    pub(crate) fn change(&mut self, generation: u32, change: &Change) -> Result<(), KernelError> {
        self.has_deleted |= change.deletes();
        change::change(&mut self.socket, generation, change)
    }
}
