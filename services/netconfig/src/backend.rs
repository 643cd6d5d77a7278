//! The interface of rule backends, in plain data.

mod program_error;

use std::fmt;

use crate::{
    family::Family,
    netlink::KernelError,
    rules::{Ruleset, Table, TableFamily, Tag},
};

pub use program_error::ProgramError;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// nf_tables, directly over netlink.
    Nftables,
    /// Programs such as `iptables-nft-restore`.
    IptablesNft,
    /// Programs such as `iptables-legacy-restore`.
    IptablesLegacy,
}

impl Backend {
    /// All backends, preferred ones first.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::IptablesNft, Self::IptablesLegacy];

    /// Returns its name in settings and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::IptablesNft => "iptables-nft",
            Self::IptablesLegacy => "iptables-legacy",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// On top of nf_tables.
    Nft,
    /// On the kernel's legacy tables.
    Legacy,
}

impl Variant {
    pub const ALL: [Self; 2] = [Self::Nft, Self::Legacy];
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Backend::from(*self).fmt(f)
    }
}

/// Returns `None` for nf_tables.
pub(crate) fn variant_of(backend: Backend) -> Option<Variant> {
    match backend {
        Backend::Nftables => None,
        Backend::IptablesNft => Some(Variant::Nft),
        Backend::IptablesLegacy => Some(Variant::Legacy),
    }
}

impl From<Variant> for Backend {
    fn from(variant: Variant) -> Self {
        match variant {
            Variant::Nft => Self::IptablesNft,
            Variant::Legacy => Self::IptablesLegacy,
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl BackendError {
    /// Returns whether a concurrent change was the cause: a retry from the current state makes sense.
    pub(crate) fn is_race(&self) -> bool {
        match self {
            Self::Kernel(error) => error.is_race(),
            Self::Program(error) => error.is_race(),
        }
    }
}

pub(crate) trait RuleBackend {
    /// Returns the tables as this backend stores them: split by family if it has no dual-stack tables.
    fn normalize(&self, ruleset: &Ruleset) -> Vec<Table>;

    /// Reads the tables of inpod and of Istio.
    fn read(&mut self) -> Result<Observed, BackendError>;

    /// Applies a change if nothing has changed since `seen` was read; otherwise the error may be a
    /// race. Atomic per table.
    fn change(&mut self, seen: &Observed, change: &Change) -> Result<(), BackendError>;

    /// Renders the change for `nft -f` or `iptables-restore`.
    fn script(&self, seen: &Observed, change: &Change) -> String;
}

/// A packet filter at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// The kernel's count of packet filter changes; 0 if the backend has none.
    pub(crate) generation: u32,
    pub(crate) tables: Vec<ObservedTable>,
    /// Remains of Istio's node agent that [`Change::delete_incumbent`] deletes.
    pub(crate) incumbent: Vec<String>,
    /// Remains of Istio's sidecar installer that [`Change::delete_sidecar`] deletes. Replaced only where inpod
    /// redirects to the sidecar itself.
    pub(crate) sidecar: Vec<String>,
    /// Jumps from foreign chains to inpod's and Istio's, deleted along with these.
    pub(crate) jumps: Vec<Jump>,
    /// Names of chains in nf_tables that iptables-nft may have written.
    pub(crate) iptables_chains: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Jump {
    /// inpod's table at that position, existing or not.
    pub(crate) table: TableId,
    /// Empty for a standalone rule of Istio's sidecar installer.
    pub(crate) to: String,
    /// Chain and rule in the backend's syntax.
    pub(crate) rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    pub(crate) table: Table,
    pub(crate) comment: Option<String>,
    /// Sets and the like; inpod's tables have none.
    pub(crate) unknown_objects: u32,
}

pub(crate) type TableId = (TableFamily, String);

impl Observed {
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.incumbent.is_empty()
    }

    /// Returns whether rules of inpod or Istio's node agent capture new connections of a family. Rules of draining
    /// pods and broken remains capture nothing.
    pub(crate) fn captures(&self, family: Family) -> bool {
        let mut ours = self.tables.iter().map(|found| &found.table);
        ours.any(|table| table.family.has(family) && table.captures())
            || self.has_others(&self.incumbent, family)
    }

    /// Like [`Self::captures`], for rules of Istio's sidecar installer.
    pub(crate) fn captures_for_sidecar(&self, family: Family) -> bool {
        self.has_others(&self.sidecar, family)
    }

    /// Istio's remains have the family of the jumps to them; its nf_tables tables have no such
    /// jumps and are dual-stack.
    fn has_others(&self, names: &[String], family: Family) -> bool {
        let is_led = || self.jumps.is_empty() || self.jumps.iter().any(|it| it.table.0.has(family));
        !names.is_empty() && is_led()
    }

    pub(crate) fn ids(&self) -> Vec<TableId> {
        self.tables.iter().map(|found| found.table.id()).collect()
    }

    pub(crate) fn tag(&self) -> Option<Tag> {
        self.tables.iter().find_map(ObservedTable::tag)
    }
}

impl ObservedTable {
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.comment.as_deref()?.parse().ok()
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Must exist: nft deletes a table that may be missing by creating it first, and closing a socket that deleted
    /// something takes the kernel tens of milliseconds.
    pub(crate) delete: Vec<TableId>,
    /// Must not exist after the deletions.
    pub(crate) create: Vec<NewTable>,
    /// Remains of Istio's node agent, deleted last.
    pub(crate) delete_incumbent: bool,
    /// Remains of Istio's sidecar installer, deleted last.
    pub(crate) delete_sidecar: bool,
}

impl Change {
    pub(crate) fn is_empty(&self) -> bool {
        let deletes_others = self.delete_incumbent || self.delete_sidecar;
        self.delete.is_empty() && self.create.is_empty() && !deletes_others
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NewTable {
    pub(crate) table: Table,
    pub(crate) comment: String,
}
