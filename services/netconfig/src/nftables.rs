//! Rules in the kernel's nf_tables, over netlink: read whole, replaced in one transaction.

mod change;
mod constants;
mod decode;
mod encode;
mod lift;
mod lower;
mod op;
mod read;
mod script;
mod sets;

pub(crate) use sets::{AddressSet, Edit};

use std::io;

use nix::sys::socket::SockProtocol;

use crate::{
    backend::{BackendError, Change, Observed, RuleBackend},
    conntrack,
    family::Family,
    inspect::Connections,
    netlink::{KernelError, Socket},
    rules::{Ruleset, Table, ambient::TABLES},
};

/// The tables of Istio's node agent (shared facts: services/docs/facts/istio-ambient.md, 1.8).
const INCUMBENT_TABLES: [&str; 3] = [
    "istio-ambient-nat",
    "istio-ambient-mangle",
    "istio-ambient-raw",
];

/// The tables of Istio's sidecar installer (shared facts: services/docs/facts/istio-sidecar.md, 4.8).
const SIDECAR_TABLES: [&str; 3] = ["istio-proxy-nat", "istio-proxy-mangle", "istio-proxy-raw"];

/// In bytes; ten thousand elements of a set with the longest comments.
const MAX_TRANSACTION_BYTES: usize = 4 << 20;

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

    /// The same, to be kept open: can take large transactions, and gives the port that events name them by.
    pub(crate) fn open_persistent() -> io::Result<(Self, u32)> {
        let opened = Self::open()?;
        let port = opened.socket.bind(MAX_TRANSACTION_BYTES)?;
        Ok((opened, port))
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

impl Nftables {
    /// Deletes what connection tracking knows of questions for names that go the wrong way, where those of these
    /// families are to go to ztunnel: it is reached by the same kind of socket.
    pub(crate) fn flush_dns(&mut self, captured: &[Family]) -> Result<(), KernelError> {
        conntrack::flush_dns(&mut self.socket, captured)
    }

    /// Deletes what connection tracking knows of connections that no rules of ours are there for, but for those that
    /// are carried.
    pub(crate) fn flush_untranslated(
        &mut self,
        families: &[Family],
        proxied: &Connections,
    ) -> Result<(), KernelError> {
        conntrack::flush_untranslated(&mut self.socket, families, proxied)
    }

    /// Deletes what connection tracking knows of connections that were there before it was, and of those that are left,
    /// but for those that are carried.
    pub(crate) fn flush_existing(
        &mut self,
        families: &[Family],
        unclosed: &Connections,
        proxied: &Connections,
    ) -> Result<(), KernelError> {
        conntrack::flush_existing(&mut self.socket, families, unclosed, proxied)
    }

    /// Deletes what connection tracking knows of connections that ztunnel took on or opened.
    pub(crate) fn flush_captured(&mut self, families: &[Family]) -> Result<(), KernelError> {
        conntrack::flush_captured(&mut self.socket, families)
    }

    /// Chains of iptables-nft, by their names: tables of nf_tables that others write.
    pub(crate) fn chains_of_iptables(&mut self) -> Result<Vec<String>, KernelError> {
        read::chains_of_iptables(&mut self.socket)
    }
}

impl RuleBackend for Nftables {
    fn normalize(&self, ruleset: &Ruleset) -> Vec<Table> {
        ruleset.tables.clone()
    }

    fn read(&mut self) -> Result<Observed, BackendError> {
        Ok(read::read(&mut self.socket, &TABLES)?)
    }

    /// One transaction.
    fn change(&mut self, seen: &Observed, change: &Change) -> Result<(), BackendError> {
        self.has_deleted |=
            !change.delete.is_empty() || change.delete_incumbent || change.delete_sidecar;
        Ok(change::change(&mut self.socket, seen, change)?)
    }

    fn script(&self, seen: &Observed, change: &Change) -> String {
        script::script(seen, change)
    }
}
