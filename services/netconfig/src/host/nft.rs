//! The probe set in nf_tables: a table of our own, each change one transaction that others' changes make void.

use std::{io, net::IpAddr, time::Duration};

use super::{
    HostError,
    owners::{Action, Elements, decide},
    rules::{SETS, TABLE, set_of, table, tag},
    selector::Selected,
    settings::Settings,
    way::{Found, Pace, Settled, Way, Wish},
};
use crate::{
    backend::Observed,
    family::Family,
    netlink::KernelError,
    nftables::{Edit, Nftables},
};

/// How often something is tried while others keep changing the node's tables.
const ATTEMPTS: usize = 16;

/// NFPROTO_INET of linux/netfilter.h.
const INET: u8 = 1;

/// See the module.
#[derive(Debug)]
pub(crate) struct Nft {
    nftables: Nftables,
    port: u32,
}

impl Nft {
    /// In the calling thread's netns.
    pub(crate) fn open() -> io::Result<Self> {
        let (nftables, port) = Nftables::open_persistent()?;
        Ok(Self { nftables, port })
    }

    fn read_once(
        &mut self,
        selected: &Selected,
        settings: &Settings,
    ) -> Result<Option<Found>, KernelError> {
        let seen = self.nftables.read_table(&[TABLE])?;
        if seen.tables.is_empty() {
            return Ok(None);
        }
        let mut found = Found {
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

    fn settle_once(&mut self, by: &str, wishes: &[Wish<'_>]) -> Result<bool, KernelError> {
        let generation = self.nftables.generation()?;
        let mut edits = Vec::new();
        for (address, wanted) in wishes {
            let set = set_of(Family::of(*address));
            let found = self.nftables.comment_of(set, *address)?;
            let action = decide(found.as_deref(), *wanted, by);
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

    /// Reads back what was written.
    fn confirm(&mut self, by: &str, wishes: &[Wish<'_>]) -> Result<(), HostError> {
        let mut left = Vec::new();
        for (address, wanted) in wishes {
            let found = self
                .nftables
                .comment_of(set_of(Family::of(*address)), *address)?;
            if decide(found.as_deref(), *wanted, by).is_some() {
                left.push(sentence(*address, found.as_deref()));
            }
        }
        HostError::unless_empty(left)
    }
}

fn sentence(address: IpAddr, found: Option<&str>) -> String {
    match found {
        None => format!("{address} is not there"),
        Some(owner) => format!("{address} is there for {owner}"),
    }
}

/// A sentence for each thing in our table, but for elements, that is not as it should be.
fn differences(seen: &Observed, selected: &Selected, settings: &Settings) -> Vec<String> {
    let wanted = table(selected, settings);
    let mut differences = Vec::new();
    for found in &seen.tables {
        for chain in &wanted.chains {
            if !found.table.chains.contains(chain) {
                differences.push(format!("chain {} is not as it should be", chain.name));
            }
        }
        if found.table.chains.len() > wanted.chains.len() {
            differences.push("there are foreign chains".to_owned());
        }
        if usize::try_from(found.unknown_objects) != Ok(SETS.len()) {
            differences.push("there are other sets or objects than the two of ours".to_owned());
        }
        if found.comment.as_deref() != Some(tag().as_str()) {
            differences.push("the table is not tagged as ours".to_owned());
        }
    }
    differences
}

impl Way for Nft {
    fn families(&self) -> &'static [Family] {
        &Family::ALL
    }

    fn read(
        &mut self,
        selected: &Selected,
        settings: &Settings,
    ) -> Result<Option<Found>, HostError> {
        let read = || self.read_once(selected, settings);
        Ok(again(read)?)
    }

    fn write(
        &mut self,
        selected: &Selected,
        settings: &Settings,
        elements: &Elements,
    ) -> Result<(), HostError> {
        let table = table(selected, settings);
        let sets = SETS.map(|set| {
            let of_family = elements.iter();
            let of_family = of_family.filter(|(address, _)| Family::of(**address) == set.family);
            let elements = of_family.map(|(address, owner)| (*address, owner.as_str()));
            (set, elements.collect())
        });
        again(|| {
            let seen = self.nftables.read_table(&[TABLE])?;
            self.nftables.replace_table(&seen, &table, &tag(), &sets)
        })?;
        let found = self.read(selected, settings)?.unwrap_or_default();
        let mut left = found.differences;
        if found.elements != *elements {
            left.push("the kernel holds other elements than were written".to_owned());
        }
        HostError::unless_empty(left)
    }

    fn clear(&mut self) -> Result<bool, HostError> {
        let cleared = again(|| {
            let seen = self.nftables.read_table(&[TABLE])?;
            if seen.tables.is_empty() {
                return Ok(false);
            }
            self.nftables.delete_table(&seen).map(|()| true)
        })?;
        let left = again(|| self.nftables.read_table(&[TABLE]))?;
        let left = left.ids().into_iter();
        let left = left.map(|(_, name)| format!("the table {name} is there again"));
        HostError::unless_empty(left.collect())?;
        Ok(cleared)
    }

    /// Without a look ahead, and whatever the generation: the kernel refuses what is there. A refusal costs it
    /// milliseconds, so that this is not for what is known.
    fn add(&mut self, by: &str, addresses: &[IpAddr]) -> Result<Option<Settled>, HostError> {
        const ANY: u32 = 0;
        let edit = |address: &IpAddr| Edit::Add(set_of(Family::of(*address)), *address, by);
        let edits: Vec<_> = addresses.iter().map(edit).collect();
        match self.nftables.edit(ANY, &edits) {
            Err(error) if error.is(nix::Error::EEXIST) || error.is_race() => Ok(None),
            Err(error) if error.is(nix::Error::ENOENT) => Ok(Some(Settled::Gone)),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let wish = |address: &IpAddr| (*address, Some(by));
                self.confirm(by, &addresses.iter().map(wish).collect::<Vec<_>>())?;
                Ok(Some(Settled::Done { changed: true }))
            }
        }
    }

    fn settle(&mut self, by: &str, wishes: &[Wish<'_>]) -> Result<Settled, HostError> {
        match again(|| self.settle_once(by, wishes)) {
            // Elements that are not there are not deleted, so that it is the table.
            Err(error) if error.is(nix::Error::ENOENT) => Ok(Settled::Gone),
            Err(error) => Err(error.into()),
            Ok(changed) => {
                if changed {
                    self.confirm(by, wishes)?;
                }
                Ok(Settled::Done { changed })
            }
        }
    }

    /// Whoever changes it is heard.
    fn is_suspicious(&mut self, _elements: &Elements) -> bool {
        false
    }

    fn hears(&self, family: u8, table: &str, port: u32) -> bool {
        (family, table) == (INET, TABLE) && port != self.port
    }

    fn pace(&self, _took: Duration) -> Pace {
        Pace {
            glance: Duration::from_secs(1),
            read: Duration::from_secs(60),
        }
    }
}

/// Again when somebody else was faster.
fn again<T>(mut work: impl FnMut() -> Result<T, KernelError>) -> Result<T, KernelError> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        match work() {
            Err(error) if error.is_race() && attempts > 0 => {}
            result => return result,
        }
    }
}
