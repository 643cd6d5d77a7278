//! The probe set's state and its changes, under a lock.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    ProbeSetError,
    eni::Eni,
    nft::{Nft, UpdateOutcome},
    refcount::Owners,
};

#[derive(Debug)]
pub(super) struct State {
    nft: Nft,
    pub(super) owners: Owners,
    /// The kernel has elements or a rule of ours, or should.
    in_use: bool,
    eni: Option<Eni>,
}

impl State {
    pub(super) fn new(nft: Nft, eni: Option<Eni>) -> Self {
        Self {
            nft,
            owners: Owners::default(),
            in_use: false,
            eni,
        }
    }

    /// Changes the kernel, too. Returns whether anything was written.
    pub(super) fn set(
        &mut self,
        owner: &str,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<bool, ProbeSetError> {
        let owned = |address| self.owners.owner_of(address).is_some();
        let is_new = !addresses.iter().copied().any(owned);
        let affected = self.owners.set(owner, addresses);
        if affected.is_empty() {
            return Ok(false);
        }
        let is_new = is_new && affected.len() == addresses.len();
        let affected: Vec<_> = affected.into_iter().collect();
        let desired = affected
            .iter()
            .map(|address| (*address, self.owners.owner_of(*address)));
        let desired: Vec<_> = desired.collect();
        let is_wanted = desired.iter().any(|(_, wanted)| wanted.is_some());
        let added = if is_new {
            let addresses: Vec<_> = desired.iter().map(|(address, _)| *address).collect();
            self.nft.add(owner, &addresses)?
        } else {
            None
        };
        let outcome = match added {
            Some(outcome) => outcome,
            None => self.nft.update_owners(owner, &desired)?,
        };
        let changed = match outcome {
            UpdateOutcome::Done { changed } => changed,
            UpdateOutcome::SetMissing if is_wanted => {
                self.write()?;
                true
            }
            UpdateOutcome::SetMissing => false,
        };
        self.in_use |= is_wanted;
        Ok(self.route_branch_eni(&affected)? || changed)
    }

    fn route_branch_eni(&mut self, affected: &[IpAddr]) -> Result<bool, ProbeSetError> {
        let Some(eni) = &mut self.eni else {
            return Ok(false);
        };
        let wanted = |address: &IpAddr| self.owners.owner_of(*address).is_some();
        let (current, gone): (BTreeSet<_>, BTreeSet<_>) =
            affected.iter().copied().partition(wanted);
        eni.update(&current, &gone)
    }

    pub(super) fn write(&mut self) -> Result<(), ProbeSetError> {
        self.nft.write(&self.owners.elements())?;
        self.in_use = true;
        Ok(())
    }

    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = self.nft.clear()?;
        self.in_use = false;
        Ok(cleared)
    }

    /// Returns whether the table changed since the last read, as far as a single request shows.
    pub(super) fn has_changed(&mut self) -> Result<bool, ProbeSetError> {
        Ok(self.in_use && self.nft.has_changed()?)
    }

    /// Returns a sentence per difference, none if no set is needed. Adopts ownerless elements.
    pub(super) fn read(&mut self) -> Result<Vec<String>, ProbeSetError> {
        let Some(found) = self.nft.read()? else {
            let missing = self.in_use.then(|| "the whole set is missing".to_owned());
            return Ok(missing.into_iter().collect());
        };
        self.owners.adopt(&found.elements);
        self.in_use = true;
        let mut differences = found.differences;
        let wanted = self.owners.elements();
        let is_missing =
            |(address, owner): &(&IpAddr, &String)| found.elements.get(*address) != Some(*owner);
        let missing = wanted.iter().filter(is_missing).count();
        if missing > 0 {
            differences.push(format!(
                "{missing} addresses are missing or have the wrong owner"
            ));
        }
        Ok(differences)
    }
}
