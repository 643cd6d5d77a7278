//! The writes to the node's own netns, under a lock: the probe set, and the ip rules of pods with a branch ENI.

use std::{collections::BTreeSet, net::IpAddr};

use inpod_types::with_causes;

use super::{
    ProbeSetError,
    eni::{Difference, Eni},
    nft::{Nft, UpdateOutcome},
    refcount::Owners,
};

/// The differences between the node and what the pods need.
#[derive(Debug, Default)]
pub(super) struct Differences {
    /// One sentence per difference of the probe set.
    set: Vec<String>,
    routing: Difference,
}

impl Differences {
    pub(super) fn is_empty(&self) -> bool {
        self.set.is_empty() && self.routing.is_empty()
    }

    pub(super) fn sentences(&self) -> Vec<String> {
        let routing = self.routing.sentences();
        self.set.iter().cloned().chain(routing).collect()
    }
}

#[derive(Debug)]
pub(super) struct State {
    nft: Nft,
    pub(super) owners: Owners,
    /// Set if the kernel has inpod's tables, or should have them.
    in_use: bool,
    eni: Option<Eni>,
    /// One sentence per repaired change by another program, until the repair is published.
    pub(super) lost: Vec<String>,
}

impl State {
    /// Creates the state, with the addresses that ip rules of an earlier process route, until their pods are known.
    pub(super) fn new(nft: Nft, mut eni: Option<Eni>) -> Self {
        let routed = eni.as_mut().map(Eni::routed_addresses).transpose();
        let routed = routed.unwrap_or_else(|error| {
            let error = with_causes(&error);
            tracing::warn!(error, "Cannot read the ip rules of an earlier run");
            None
        });
        let mut owners = Owners::default();
        owners.adopt_unknown(routed.unwrap_or_default());
        Self {
            nft,
            owners,
            in_use: false,
            eni,
            lost: Vec::new(),
        }
    }

    /// Sets an owner's addresses here and in the kernel. Returns whether anything was written.
    pub(super) fn set(
        &mut self,
        owner: &str,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<bool, ProbeSetError> {
        let is_free = |address: &IpAddr| self.owners.owner_of(*address).is_none();
        let are_free = addresses.iter().all(is_free);
        let affected = self.owners.set(owner, addresses);
        if affected.is_empty() {
            return Ok(false);
        }
        let are_new = are_free && affected.len() == addresses.len();
        let desired = affected.iter();
        let desired: Vec<_> = desired
            .map(|address| (*address, self.owners.owner_of(*address)))
            .collect();
        let is_wanted = desired.iter().any(|(_, wanted)| wanted.is_some());
        let changed = match self.nft.update(owner, &desired, are_new)? {
            UpdateOutcome::Done { changed } => changed,
            UpdateOutcome::SetMissing if is_wanted => {
                let was_there = self.in_use;
                self.write()?;
                self.lost.extend(was_there.then(missing_set));
                true
            }
            UpdateOutcome::SetMissing => false,
        };
        self.in_use |= is_wanted;
        let difference = self.routing_difference()?;
        self.route(&difference)?;
        Ok(changed || !difference.is_empty())
    }

    fn routing_difference(&mut self) -> Result<Difference, ProbeSetError> {
        let owners = &self.owners;
        let eni = self.eni.as_mut();
        let compared = eni.map(|eni| eni.compare(|| owners.addresses()));
        let compared = compared.transpose().map_err(ProbeSetError::BranchEni)?;
        Ok(compared.unwrap_or_default())
    }

    fn route(&mut self, difference: &Difference) -> Result<(), ProbeSetError> {
        if let Some(eni) = &mut self.eni {
            let lost = eni.change(difference).map_err(ProbeSetError::BranchEni)?;
            self.lost.extend(lost);
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), ProbeSetError> {
        self.nft.write(&self.owners.elements())?;
        self.in_use = true;
        Ok(())
    }

    /// Writes the differing parts again. At an upgrade, the differences of the set come from an earlier process and are
    /// not reported as changes by another program.
    pub(super) fn mend(
        &mut self,
        differences: Differences,
        is_upgrade: bool,
    ) -> Result<(), ProbeSetError> {
        let Differences { set, routing } = differences;
        if !set.is_empty() {
            self.write()?;
        }
        if !is_upgrade {
            self.lost.extend(set);
        }
        self.route(&routing)
    }

    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = self.nft.clear()?;
        self.in_use = false;
        Ok(cleared)
    }

    /// Returns whether anything has changed since the last read, as far as the tables' states and the ip rules show.
    pub(super) fn has_changed(&mut self) -> Result<bool, ProbeSetError> {
        if self.in_use && self.nft.has_changed()? {
            return Ok(true);
        }
        let changed = self.eni.as_mut().map(Eni::has_changed);
        changed
            .unwrap_or(Ok(false))
            .map_err(ProbeSetError::BranchEni)
    }

    /// Compares the node with what the pods need, and adopts elements without a known owner.
    pub(super) fn read(&mut self) -> Result<Differences, ProbeSetError> {
        Ok(Differences {
            set: self.read_set()?,
            routing: self.routing_difference()?,
        })
    }

    /// Returns one sentence per difference; the list is empty if no set is needed.
    fn read_set(&mut self) -> Result<Vec<String>, ProbeSetError> {
        let Some(found) = self.nft.read()? else {
            let is_needed = self.in_use || self.owners.count() > 0;
            return Ok(is_needed.then(missing_set).into_iter().collect());
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

fn missing_set() -> String {
    "the whole set is missing".to_owned()
}
