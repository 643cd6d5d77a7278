//! The probe set as our own nf_tables table. Each change is one transaction, void after concurrent changes.

use std::{io, net::IpAddr};

use super::{
    ProbeSetError,
    refcount::{Action, Elements, decide_action},
    rules::{SETS, TABLE, set_of, table, tag},
    selector::Selected,
    settings::ProbeSettings,
};
use crate::{
    family::Family,
    netlink::KernelError,
    nftables::{Edit, Nftables, Observed},
};

/// While others keep changing the node's tables.
const MAX_ATTEMPTS: usize = 16;

/// NFPROTO_INET of linux/netfilter.h.
const INET: u8 = 1;

/// `None` to remove the address.
pub(super) type DesiredOwner<'a> = (IpAddr, Option<&'a str>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ObservedSet {
    /// One sentence each; without elements.
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
    port: u32,
}

impl Nft {
    /// Opens the calling thread's netns.
    pub(super) fn open() -> io::Result<Self> {
        let (nftables, port) = Nftables::open_persistent()?;
        Ok(Self { nftables, port })
    }

    fn read_once(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, KernelError> {
        let seen = self.nftables.read_table(&[TABLE])?;
        if seen.tables.is_empty() {
            return Ok(None);
        }
        let mut found = ObservedSet {
            differences: differences(&seen, selected, settings),
            elements: Elements::new(),
        };
        for set in SETS {
            match self.nftables.elements(set) {
                Err(error) if error.is(nix::Error::ENOENT) => {
                    found
                        .differences
                        .push(format!("set {} is missing", set.name));
                }
                elements => found.elements.extend(elements?),
            }
        }
        if seen.generation == self.nftables.generation()? {
            Ok(Some(found))
        } else {
            Err(KernelError::new("read the probe table", nix::Error::EINTR))
        }
    }

    fn update_owners_once(
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

    /// Fails if it reads back something else.
    fn confirm(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<(), ProbeSetError> {
        let mut left = Vec::new();
        for (address, wanted) in desired {
            let found = self
                .nftables
                .comment_of(set_of(Family::of(*address)), *address)?;
            if decide_action(found.as_deref(), *wanted, requester).is_some() {
                left.push(describe_element(*address, found.as_deref()));
            }
        }
        ProbeSetError::unless_empty(left)
    }
}

fn describe_element(address: IpAddr, found: Option<&str>) -> String {
    match found {
        None => format!("{address} is missing"),
        Some(owner) => format!("{address} belongs to {owner}"),
    }
}

fn differences(seen: &Observed, selected: &Selected, settings: &ProbeSettings) -> Vec<String> {
    let wanted = table(selected, settings);
    let mut differences = Vec::new();
    for found in &seen.tables {
        for chain in &wanted.chains {
            if !found.table.chains.contains(chain) {
                differences.push(format!("chain {} is out of sync", chain.name));
            }
        }
        if found.table.chains.len() > wanted.chains.len() {
            differences.push("the table has foreign chains".to_owned());
        }
        if usize::try_from(found.unknown_objects) != Ok(SETS.len()) {
            differences
                .push("the table has other sets or objects than the two expected".to_owned());
        }
        if found.comment.as_deref() != Some(tag().as_str()) {
            differences.push("the table's comment is not inpod's".to_owned());
        }
    }
    differences
}

impl Nft {
    /// Returns `None` if there is no set of ours.
    pub(super) fn read(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, ProbeSetError> {
        let read = || self.read_once(selected, settings);
        Ok(retry_on_race(read)?)
    }

    /// Writes everything. Elements and rules that stay are never absent.
    pub(super) fn write(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
        elements: &Elements,
    ) -> Result<(), ProbeSetError> {
        let table = table(selected, settings);
        let sets = SETS.map(|set| {
            let of_family = elements.iter();
            let of_family = of_family.filter(|(address, _)| Family::of(**address) == set.family);
            let elements = of_family.map(|(address, owner)| (*address, owner.as_str()));
            (set, elements.collect())
        });
        retry_on_race(|| {
            let seen = self.nftables.read_table(&[TABLE])?;
            self.nftables.replace_table(&seen, &table, &tag(), &sets)
        })?;
        let found = self.read(selected, settings)?.unwrap_or_default();
        let mut left = found.differences;
        if found.elements != *elements {
            left.push("the kernel holds other elements than were written".to_owned());
        }
        ProbeSetError::unless_empty(left)
    }

    /// Removes everything, and verifies that. Returns whether there was anything.
    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = retry_on_race(|| {
            let seen = self.nftables.read_table(&[TABLE])?;
            if seen.tables.is_empty() {
                return Ok(false);
            }
            self.nftables.delete_table(&seen).map(|()| true)
        })?;
        let left = retry_on_race(|| self.nftables.read_table(&[TABLE]))?;
        let left = left.ids().into_iter();
        let left = left.map(|(_, name)| format!("the table {name} was recreated"));
        ProbeSetError::unless_empty(left.collect())?;
        Ok(cleared)
    }

    /// Adds elements believed to be new, without a read and a generation: the kernel refuses existing ones, in
    /// milliseconds. Returns `None`, and adds nothing, if one exists.
    pub(super) fn add(
        &mut self,
        requester: &str,
        addresses: &[IpAddr],
    ) -> Result<Option<UpdateOutcome>, ProbeSetError> {
        const ANY: u32 = 0;
        let edit = |address: &IpAddr| Edit::Add(set_of(Family::of(*address)), *address, requester);
        let edits: Vec<_> = addresses.iter().map(edit).collect();
        match self.nftables.edit(ANY, &edits) {
            Err(error) if error.is(nix::Error::EEXIST) || error.is_race() => Ok(None),
            Err(error) if error.is(nix::Error::ENOENT) => Ok(Some(UpdateOutcome::SetMissing)),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let entry = |address: &IpAddr| (*address, Some(requester));
                self.confirm(requester, &addresses.iter().map(entry).collect::<Vec<_>>())?;
                Ok(Some(UpdateOutcome::Done { changed: true }))
            }
        }
    }

    pub(super) fn update_owners(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<UpdateOutcome, ProbeSetError> {
        match retry_on_race(|| self.update_owners_once(requester, desired)) {
            // Missing elements are not deleted, so it must be the table.
            Err(error) if error.is(nix::Error::ENOENT) => Ok(UpdateOutcome::SetMissing),
            Err(error) => Err(error.into()),
            Ok(changed) => {
                if changed {
                    self.confirm(requester, desired)?;
                }
                Ok(UpdateOutcome::Done { changed })
            }
        }
    }

    /// Returns whether a change of an nf_tables table may concern the set: family (NFPROTO of linux/netfilter.h),
    /// name, and netlink port of the socket that changed it.
    pub(super) fn is_relevant(&self, family: u8, table: &str, port: u32) -> bool {
        (family, table) == (INET, TABLE) && port != self.port
    }
}

fn retry_on_race<T>(mut work: impl FnMut() -> Result<T, KernelError>) -> Result<T, KernelError> {
    let mut attempts = MAX_ATTEMPTS;
    loop {
        attempts -= 1;
        match work() {
            Err(error) if error.is_race() && attempts > 0 => {}
            result => return result,
        }
    }
}
