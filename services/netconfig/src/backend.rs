//! The interface of rule backends. All of them exchange plain data, so that the code above is the same for each.

pub(crate) mod detect;

use std::fmt;

use crate::{
    family::Family,
    iptables::ProgramError,
    netlink::KernelError,
    rules::{Ruleset, Table, TableFamily, Tag},
};

/// A way to write rules into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// nf_tables, directly over netlink.
    Nftables,
    /// The programs of iptables-nft, such as `iptables-nft-restore`.
    IptablesNft,
    /// The programs of iptables-legacy, such as `iptables-legacy-restore`.
    IptablesLegacy,
}

impl Backend {
    /// All backends, in order of preference.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::IptablesNft, Self::IptablesLegacy];

    /// Returns the name in settings and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::IptablesNft => "iptables-nft",
            Self::IptablesLegacy => "iptables-legacy",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failed read or write of a backend.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl BackendError {
    /// Returns whether a concurrent change caused the failure, so that a retry from the current state makes sense.
    pub(crate) fn is_race(&self) -> bool {
        match self {
            Self::Kernel(error) => error.is_race(),
            Self::Program(error) => error.is_race(),
        }
    }
}

/// A rule backend in one netns.
pub(crate) trait RuleBackend {
    /// Returns a ruleset's tables as this backend stores them: split by family if it has no dual-stack tables.
    fn normalize(&self, ruleset: &Ruleset) -> Vec<Table>;

    /// Reads the tables of inpod and of Istio.
    fn read(&mut self) -> Result<Observed, BackendError>;

    /// Applies a change, provided that nothing has changed since `seen` was read; otherwise the error may be a race.
    /// Each table is changed atomically.
    fn change(&mut self, seen: &Observed, change: &Change) -> Result<(), BackendError>;

    /// Renders the change for `nft -f` or `iptables-restore`.
    fn script(&self, seen: &Observed, change: &Change) -> String;
}

/// The state of a netns's packet filter at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// The kernel's count of changes to the netns's packet filter; 0 if the backend has none.
    pub(crate) generation: u32,
    /// inpod's tables, in evaluation order.
    pub(crate) tables: Vec<ObservedTable>,
    /// Remains of Istio's node agent, by the names that [`Change::delete_incumbent`] deletes.
    pub(crate) incumbent: Vec<String>,
    /// Remains of Istio's sidecar installer, by the names that [`Change::delete_sidecar`] deletes. They are replaced
    /// only where inpod redirects to the sidecar itself.
    pub(crate) sidecar: Vec<String>,
    /// Jumps from foreign chains to inpod's and Istio's chains. They are deleted along with the chains.
    pub(crate) jumps: Vec<Jump>,
}

/// A rule in a foreign chain that jumps to a chain of inpod or Istio.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Jump {
    /// The table of inpod at that position, whether it exists or not.
    pub(crate) table: TableId,
    /// The target chain; empty for a standalone rule of Istio's sidecar installer.
    pub(crate) to: String,
    /// The chain and the rule in the backend's syntax.
    pub(crate) rule: String,
}

/// A table as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    pub(crate) table: Table,
    /// The tag, as text.
    pub(crate) comment: Option<String>,
    /// Sets and other objects in the table; inpod's have none.
    pub(crate) unknown_objects: u32,
}

pub(crate) type TableId = (TableFamily, String);

impl Observed {
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.incumbent.is_empty()
    }

    /// Returns whether new connections of a family are captured by rules of inpod or Istio's node agent. The rules of a
    /// draining pod and remains of broken ones capture nothing.
    pub(crate) fn captures(&self, family: Family) -> bool {
        let mut ours = self.tables.iter().map(|found| &found.table);
        ours.any(|table| table.family.has(family) && table.captures())
            || self.has_others(&self.incumbent, family)
    }

    /// Like [`Self::captures`], for rules of Istio's sidecar installer.
    pub(crate) fn captures_for_sidecar(&self, family: Family) -> bool {
        self.has_others(&self.sidecar, family)
    }

    /// The family of Istio's remains is that of the jumps to them; its nf_tables tables have no such
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

/// A change to a netns's tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Tables to delete. They must exist: nft's way to delete a table that may not exist is to create it first, and
    /// closing a socket that has deleted something takes the kernel tens of milliseconds.
    pub(crate) delete: Vec<TableId>,
    /// Tables to create; none of them may exist after the deletions.
    pub(crate) create: Vec<NewTable>,
    /// Deletes the remains of Istio's node agent, after everything else.
    pub(crate) delete_incumbent: bool,
    /// Deletes the remains of Istio's sidecar installer, after everything else.
    pub(crate) delete_sidecar: bool,
}

impl Change {
    pub(crate) fn is_empty(&self) -> bool {
        let deletes_others = self.delete_incumbent || self.delete_sidecar;
        self.delete.is_empty() && self.create.is_empty() && !deletes_others
    }
}

/// A table to create, with its tag.
#[derive(Clone, Debug)]
pub(crate) struct NewTable {
    pub(crate) table: Table,
    pub(crate) comment: String,
}
