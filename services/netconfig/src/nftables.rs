//! Rules in the kernel's nf_tables, over netlink: read whole, replaced in one transaction.

mod change;
mod decode;
mod encode;
mod lift;
mod lower;
mod number;
mod op;
mod read;

use std::io;

use nix::sys::socket::SockProtocol;

use crate::{
    netlink::{KernelError, Socket},
    rules::{Table, Tag},
};

/// What holds rules. Takes and gives plain data, so that another backend can take its place.
pub(crate) trait RuleBackend {
    /// The tables of these names, as they are now.
    fn read(&mut self, names: &[&str]) -> Result<Observed, KernelError>;

    /// Makes a change in one step, provided that nothing has changed since `seen` was read; otherwise the error is a
    /// race and nothing is changed.
    fn change(&mut self, seen: &Observed, change: &Change<'_>) -> Result<(), KernelError>;
}

/// Tables that were read together.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// Counts the changes to the netns's packet filter; anybody's.
    generation: u32,
    pub(crate) tables: Vec<ObservedTable>,
}

/// A table that was read.
#[derive(Clone, Debug)]
pub(crate) struct ObservedTable {
    pub(crate) table: Table,
    pub(crate) comment: Option<String>,
    /// Sets and other objects in it, of which ours have none.
    pub(crate) others: u32,
}

impl Observed {
    /// The names of those that are there.
    pub(crate) fn names(&self) -> Vec<String> {
        let names = self.tables.iter().map(|found| found.table.name.clone());
        names.collect()
    }
}

impl ObservedTable {
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.comment.as_deref()?.parse().ok()
    }
}

/// What is to be different.
#[derive(Debug, Default)]
pub(crate) struct Change<'a> {
    /// Tables to delete. They must exist: deleting what may not exist takes creating it first, and closing a socket
    /// that deleted something takes the kernel tens of milliseconds (crates-and-floor.md, 0.4).
    pub(crate) delete: Vec<String>,
    /// Tables to create.
    pub(crate) create: Vec<NewTable<'a>>,
}

/// A table to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTable<'a> {
    pub(crate) table: &'a Table,
    pub(crate) comment: &'a str,
}

/// The kernel's nf_tables in one netns.
#[derive(Debug)]
pub(crate) struct Nftables {
    socket: Socket,
    has_deleted: bool,
}

impl Nftables {
    /// Opens a socket in the calling thread's netns; it can be used from any other.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            socket: Socket::open(SockProtocol::NetlinkNetFilter)?,
            has_deleted: false,
        })
    }

    /// Closes the socket. After a deletion that waits for the kernel to have freed what was deleted, for tens of
    /// milliseconds, so that another thread does it. It is started at home, and there it stays.
    pub(crate) fn close(self) {
        if self.has_deleted {
            let closing = std::thread::Builder::new().spawn(move || drop(self));
            // Without a thread it was closed right here.
            drop(closing);
        }
    }
}

impl RuleBackend for Nftables {
    fn read(&mut self, names: &[&str]) -> Result<Observed, KernelError> {
        read::read(&mut self.socket, names)
    }

    fn change(&mut self, seen: &Observed, change: &Change<'_>) -> Result<(), KernelError> {
        self.has_deleted |= !change.delete.is_empty();
        change::change(&mut self.socket, seen.generation, change)
    }
}
