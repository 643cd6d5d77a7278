//! What rules are written with. Each backend takes and gives plain data, so that everything above is the same for all.

pub(crate) mod detect;

use std::fmt;

use crate::{
    family::Family,
    iptables::ProgramError,
    netlink::KernelError,
    rules::{Ruleset, Table, TableFamily, Tag},
};

/// What rules are written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// nf_tables, over netlink.
    Nftables,
    /// `iptables-nft-restore`.
    IptablesNft,
    /// `iptables-legacy-restore`.
    IptablesLegacy,
}

impl Backend {
    /// All of them, in the order in which one is preferred.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::IptablesNft, Self::IptablesLegacy];

    /// As settings and people name it.
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

/// Why a backend could not read or write.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A program of iptables did not do it.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl BackendError {
    /// Whether somebody else changed something meanwhile, so that it can be tried again from what is there by then.
    pub(crate) fn is_race(&self) -> bool {
        match self {
            Self::Kernel(error) => error.is_race(),
            Self::Program(error) => error.is_race(),
        }
    }
}

/// What holds rules in one netns.
pub(crate) trait RuleBackend {
    /// The tables of a ruleset as this backend keeps them: one per family, where it knows no tables for both.
    fn shape(&self, ruleset: &Ruleset) -> Vec<Table>;

    /// What is there of inpod and of Istio's node agent.
    fn read(&mut self) -> Result<Observed, BackendError>;

    /// Makes a change, provided that nothing has changed since `seen` was read; otherwise the error may be a race.
    /// Of one table it is one step, and nothing of it is done where any of it is refused.
    fn change(&mut self, seen: &Observed, change: &Change) -> Result<(), BackendError>;

    /// The change as text for `nft -f` or `iptables-restore`.
    fn script(&self, seen: &Observed, change: &Change) -> String;
}

/// What was read together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Counts the changes to the netns's packet filter, anybody's. 0 where nothing counts them.
    pub(crate) generation: u32,
    /// Our tables, in the order in which they take effect.
    pub(crate) tables: Vec<ObservedTable>,
    /// What Istio's node agent left, by names that [`Change::delete_incumbent`] deletes.
    pub(crate) incumbent: Vec<String>,
    /// What Istio's sidecar installer left, by names that [`Change::delete_sidecar`] deletes. Only where a sidecar is
    /// redirected by us it is ours to replace.
    pub(crate) sidecar: Vec<String>,
    /// What leads to our chains and the incumbent's, where those stand in tables of others. It goes with them.
    pub(crate) jumps: Vec<Jump>,
}

/// A rule of a chain of others that leads to one of ours, or of the incumbent's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Jump {
    /// Ours, or the one of ours that would stand there.
    pub(crate) table: TableId,
    /// The chain that it leads to. Nothing for a rule of Istio's sidecar installer that stands alone.
    pub(crate) to: String,
    /// Its chain and the rule, in the backend's words.
    pub(crate) rule: String,
}

/// A table that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    pub(crate) table: Table,
    /// The tag, as text.
    pub(crate) comment: Option<String>,
    /// Sets and other objects in it, of which ours have none.
    pub(crate) others: u32,
}

/// Which table.
pub(crate) type TableId = (TableFamily, String);

impl Observed {
    /// Whether nothing of anybody's is there.
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.incumbent.is_empty()
    }

    /// Whether rules of ours or the incumbent's capture connections of a family when they begin. Not those that take the
    /// place of capture while a pod is withdrawn, nor what is left of ones that were torn out.
    pub(crate) fn captures(&self, family: Family) -> bool {
        let mut ours = self.tables.iter().map(|found| &found.table);
        ours.any(|table| table.family.has(family) && table.captures())
            || self.has_others(&self.incumbent, family)
    }

    /// The same of rules of Istio's sidecar installer.
    pub(crate) fn captures_for_sidecar(&self, family: Family) -> bool {
        self.has_others(&self.sidecar, family)
    }

    /// What Istio left is of a family as the jumps to it are; its tables of nf_tables, to which none leads, are of both.
    fn has_others(&self, names: &[String], family: Family) -> bool {
        let is_led = || self.jumps.is_empty() || self.jumps.iter().any(|it| it.table.0.has(family));
        !names.is_empty() && is_led()
    }

    /// Our tables.
    pub(crate) fn ids(&self) -> Vec<TableId> {
        self.tables.iter().map(|found| found.table.id()).collect()
    }

    /// The tag of our tables.
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.tables.iter().find_map(ObservedTable::tag)
    }
}

impl ObservedTable {
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.comment.as_deref()?.parse().ok()
    }
}

/// What is to be different.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Tables to delete. They must exist: deleting what may not exist takes creating it first, and closing a socket
    /// that deleted something takes the kernel tens of milliseconds (crates-and-floor.md, 0.4).
    pub(crate) delete: Vec<TableId>,
    /// Tables to create, of those that are deleted or not there.
    pub(crate) create: Vec<NewTable>,
    /// Whether what Istio's node agent left is deleted, after the rest.
    pub(crate) delete_incumbent: bool,
    /// Whether what Istio's sidecar installer left is deleted, likewise.
    pub(crate) delete_sidecar: bool,
}

impl Change {
    /// Whether nothing is to be different.
    pub(crate) fn is_empty(&self) -> bool {
        let deletes_others = self.delete_incumbent || self.delete_sidecar;
        self.delete.is_empty() && self.create.is_empty() && !deletes_others
    }
}

/// A table to create.
#[derive(Clone, Debug)]
pub(crate) struct NewTable {
    pub(crate) table: Table,
    pub(crate) comment: String,
}
