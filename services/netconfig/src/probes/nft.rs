//! The probe set in inpod's own nf_tables tables. Each change is one transaction, and the kernel refuses a transaction
//! that is based on an outdated read.

use std::{io, net::IpAddr};

use inpod_types::with_causes;

use super::{
    ProbeSetError, ProbeSettings,
    refcount::{Action, Elements, decide_action},
    rules::{SETS, TABLE, bridge_table, set_of, table, tag},
};
use crate::{
    error::require_none,
    family::Family,
    netlink::{KernelError, retry_on_race},
    nftables::{AddressSet, Edit, NamedTable, Nftables, TableState},
    rules::{Expr, Table, TableFamily},
};

/// An address and the owner that its element is to name; `None` removes the element.
pub(super) type DesiredOwner<'a> = (IpAddr, Option<&'a str>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ObservedSet {
    /// One sentence per difference of the tables. The elements are not compared.
    pub(super) differences: Vec<String>,
    pub(super) elements: Elements,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpdateOutcome {
    /// The elements are as desired.
    Done {
        changed: bool,
    },
    SetMissing,
}

#[derive(Debug)]
pub(super) struct Nft {
    nftables: Nftables,
    /// The table of family inet, and the table of family bridge unless the kernel lacks the family.
    wanted: Vec<Table>,
    /// The tables' states at the last complete read.
    seen: Vec<Option<TableState>>,
}

impl Nft {
    /// Opens a socket in the calling thread's netns.
    pub(super) fn open(sender: &Expr, settings: &ProbeSettings) -> io::Result<Self> {
        Ok(Self {
            nftables: Nftables::open_persistent()?,
            wanted: vec![table(sender, settings), bridge_table(settings)],
            seen: Vec::new(),
        })
    }

    /// Returns whether a table was deleted or created again, or a chain or set was added or deleted. Requests only the
    /// tables themselves, at a cost that does not depend on the tables and chains of other programs.
    pub(super) fn has_changed(&mut self) -> Result<bool, ProbeSetError> {
        Ok(self.states()? != self.seen)
    }

    fn states(&mut self) -> Result<Vec<Option<TableState>>, KernelError> {
        let nftables = &mut self.nftables;
        let state = |table: &Table| nftables.table_state(table.family, &table.name);
        self.wanted.iter().map(state).collect()
    }

    /// Reads the tables and the elements. Returns `None` if inpod has no table.
    pub(super) fn read(&mut self) -> Result<Option<ObservedSet>, ProbeSetError> {
        Ok(retry_on_race(|| self.read_once())?)
    }

    fn read_once(&mut self) -> Result<Option<ObservedSet>, KernelError> {
        let generation = self.nftables.generation()?;
        let nftables = &mut self.nftables;
        let tables = self.wanted.iter();
        let found = tables.map(|wanted| nftables.read_by_name(wanted));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let state = |found: &Option<NamedTable>| found.as_ref().map(|found| found.state);
        self.seen = found.iter().map(state).collect();
        if found.iter().all(Option::is_none) {
            return Ok(None);
        }
        let tables = self.wanted.iter().zip(&found);
        let mut observed = ObservedSet {
            differences: tables
                .flat_map(|(wanted, found)| differences(found.as_ref(), wanted))
                .collect(),
            elements: Elements::new(),
        };
        for set in SETS {
            match self.nftables.elements(set) {
                Err(error) if error.is(nix::Error::ENOENT) => {
                    observed
                        .differences
                        .push(format!("set {} is missing", set.name));
                }
                elements => observed.elements.extend(elements?),
            }
        }
        if generation == self.nftables.generation()? {
            Ok(Some(observed))
        } else {
            Err(KernelError::new("read the probe table", nix::Error::EINTR))
        }
    }

    /// Writes the tables and all elements, and reads them back. Elements and rules that stay are never absent.
    pub(super) fn write(&mut self, elements: &Elements) -> Result<(), ProbeSetError> {
        let sets = SETS.map(|set| {
            let of_family = elements.iter();
            let of_family = of_family.filter(|(address, _)| Family::of(**address) == set.family);
            let elements = of_family.map(|(address, owner)| (*address, owner.as_str()));
            (set, elements.collect())
        });
        self.write_tables(&sets)?;
        let found = self.read()?.unwrap_or_default();
        let mut left = found.differences;
        if found.elements != *elements {
            left.push("the kernel holds other elements than were written".to_owned());
        }
        require_none(left, ProbeSetError::Differs)
    }

    /// Writes the tables. If the kernel refuses, as a kernel without the family bridge does, only the table of family
    /// inet is written: probes must not fail for lack of a defense.
    fn write_tables(
        &mut self,
        sets: &[(AddressSet, Vec<(IpAddr, &str)>)],
    ) -> Result<(), KernelError> {
        let written = retry_on_race(|| self.nftables.replace_tables(&self.wanted, &tag(), sets));
        let mut without_bridge = self.wanted.clone();
        without_bridge.retain(|table| table.family != TableFamily::Bridge);
        match written {
            Err(error) if without_bridge.len() < self.wanted.len() => {
                retry_on_race(|| self.nftables.replace_tables(&without_bridge, &tag(), sets))?;
                let error = with_causes(&error);
                tracing::warn!(
                    error,
                    "Cannot write nf_tables for bridges (CONFIG_NF_TABLES_BRIDGE): behind the same bridge, a pod with \
                     CAP_NET_RAW can reach a pod of the mesh past ztunnel"
                );
                self.wanted = without_bridge;
                Ok(())
            }
            written => written,
        }
    }

    /// Removes the tables and verifies their absence. Returns whether there was a table.
    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = retry_on_race(|| self.nftables.delete_tables(&self.wanted))?;
        self.seen = self.states()?;
        let left = self.seen.iter().flatten();
        let left = left.map(|_| format!("a table {TABLE} was recreated"));
        require_none(left.collect(), ProbeSetError::Differs)?;
        Ok(cleared)
    }

    /// Makes the elements name their desired owners. New addresses are first added without a read: if an element
    /// exists, the kernel refuses the transaction within milliseconds, and the elements are read.
    pub(super) fn update(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
        are_new: bool,
    ) -> Result<UpdateOutcome, KernelError> {
        let added = are_new.then(|| self.add(desired)).transpose();
        let result = match added {
            Ok(Some(())) => Ok(true),
            Err(error) if !error.is(nix::Error::EEXIST) && !error.is_race() => Err(error),
            Ok(None) | Err(_) => retry_on_race(|| self.update_once(requester, desired)),
        };
        match result {
            Ok(changed) => Ok(UpdateOutcome::Done { changed }),
            // No edit deletes a missing element, so the table or a set is missing.
            Err(error) if error.is(nix::Error::ENOENT) => Ok(UpdateOutcome::SetMissing),
            Err(error) => Err(error),
        }
    }

    fn add(&mut self, desired: &[DesiredOwner<'_>]) -> Result<(), KernelError> {
        const ANY_GENERATION: u32 = 0;
        let edits = desired.iter().filter_map(|(address, owner)| {
            Some(Edit::Add(set_of(Family::of(*address)), *address, (*owner)?))
        });
        self.nftables
            .edit(ANY_GENERATION, &edits.collect::<Vec<_>>())
    }

    fn update_once(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<bool, KernelError> {
        let generation = self.nftables.generation()?;
        let mut edits = Vec::new();
        for (address, wanted) in desired {
            let set = set_of(Family::of(*address));
            let found = self.nftables.comment_of(set, *address)?;
            let action = decide_action(found.as_deref(), *wanted, requester);
            if matches!(action, Some(Action::Delete | Action::Rename)) {
                edits.push(Edit::Delete(set, *address));
            }
            if let (Some(Action::Add | Action::Rename), Some(owner)) = (action, wanted) {
                edits.push(Edit::Add(set, *address, owner));
            }
        }
        if edits.is_empty() {
            return Ok(false);
        }
        self.nftables.edit(generation, &edits)?;
        Ok(true)
    }
}

fn differences(found: Option<&NamedTable>, wanted: &Table) -> Vec<String> {
    let Table {
        family,
        name,
        chains,
    } = wanted;
    let Some(found) = found else {
        return vec![format!("table {family} {name} is missing")];
    };
    let mut differences = Vec::new();
    for chain in chains {
        if !found.chains.contains(chain) {
            differences.push(format!("{family} chain {} is out of sync", chain.name));
        }
    }
    let has_sets = *family == TableFamily::Inet;
    let objects = found.chains.len() + if has_sets { SETS.len() } else { 0 };
    if usize::try_from(found.state.objects) != Ok(objects) {
        differences.push(format!(
            "table {family} {name} has other chains, sets or objects than inpod's"
        ));
    }
    if found.comment.as_deref() != Some(tag().as_str()) {
        differences.push(format!(
            "the comment of table {family} {name} is not inpod's"
        ));
    }
    differences
}
