//! Describes nf_tables of a netns at one point in time, and changes of them.

use super::leftovers::{Author, Leftovers};
use crate::{
    family::Family,
    rules::{Table, TableFamily, Tag},
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// The kernel's count of nf_tables changes in the netns.
    pub(crate) generation: u32,
    pub(crate) tables: Vec<ObservedTable>,
    pub(crate) leftovers: Leftovers,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    pub(crate) table: Table,
    pub(crate) comment: Option<String>,
    /// The number of sets and other objects; inpod's tables have none.
    pub(crate) unknown_objects: u32,
    /// The number of rules if inpod reads none, because the rules are too many or too large.
    pub(crate) unread_rules: Option<u32>,
    /// The UDP flows counted since the table was created; 0 without the rule that counts.
    pub(crate) uncaptured_udp_flows: u64,
}

pub(crate) type TableId = (TableFamily, String);

impl Observed {
    /// Returns whether the netns has rules of inpod or Istio, except rules of Istio's sidecar installer.
    pub(crate) fn has_rules(&self) -> bool {
        !self.tables.is_empty() || self.leftovers.has(Author::is_replaced_by_all)
    }

    /// Returns whether rules capture new connections of a family, except rules of Istio's sidecar installer. Rules
    /// of draining pods and broken remains capture nothing.
    pub(crate) fn captures(&self, family: Family) -> bool {
        let mut ours = self.tables.iter().map(|found| &found.table);
        ours.any(|table| table.family.has(family) && table.captures())
            || self.leftovers.captures(family, Author::is_replaced_by_all)
    }

    pub(crate) fn ids(&self) -> Vec<TableId> {
        self.tables.iter().map(|found| found.table.id()).collect()
    }

    pub(crate) fn uncaptured_udp_flows(&self) -> u64 {
        let counts = self.tables.iter().map(|found| found.uncaptured_udp_flows);
        counts.sum()
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

/// A change made in one transaction, which the kernel refuses as a whole.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Tables to delete, each of which must exist. To delete a possibly missing table, nft would create the table
    /// first, and closing a socket after a deletion takes the kernel tens of milliseconds.
    pub(crate) delete: Vec<TableId>,
    /// Tables to create, none of which may exist after the deletions.
    pub(crate) create: Vec<NewTable>,
    /// Foreign rules to delete in the same transaction.
    pub(crate) leftovers: Leftovers,
}

impl Change {
    pub(crate) fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.create.is_empty() && self.leftovers.is_empty()
    }

    pub(crate) fn deletes(&self) -> bool {
        !self.delete.is_empty() || !self.leftovers.is_empty()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NewTable {
    pub(crate) table: Table,
    pub(crate) comment: String,
}
