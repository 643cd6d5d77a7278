//! The writes to the node's own netns, under a lock: the probe set, and the ip rules of pods with a branch ENI.

use std::{collections::BTreeSet, net::IpAddr};

use inpod_types::with_causes;

use super::{
    ProbeSetError,
    eni::{Difference, Eni},
    nft::{Nft, UpdateOutcome},
    refcount::Owners,
};

/// Missing and superfluous items of the node.
#[derive(Debug, Default)]
pub(super) struct Differences {
    /// A sentence per difference of the probe set.
    set: Vec<String>,
    routing: Difference,
}

impl Differences {
    pub(super) fn is_empty(&self) -> bool {
        self.set.is_empty() && self.routing.is_empty()
    }

    pub(super) fn sentences(&self) -> Vec<String> {
        let mut sentences = self.set.clone();
        sentences.extend(self.routing.sentences());
        sentences
    }

    /// Returns a sentence per missing ip rule, which no upgrade of inpod explains.
    pub(super) fn lost_rules(&self) -> Vec<String> {
        self.routing.lost()
    }
}

#[derive(Debug)]
pub(super) struct State {
    nft: Nft,
    pub(super) owners: Owners,
    /// The kernel has elements or a rule of ours, or should.
    in_use: bool,
    eni: Option<Eni>,
}

impl State {
    /// Keeps the addresses that ip rules of an earlier process route, until their pods are known.
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
        let changed = self.eni.as_mut().map(|eni| eni.change(difference));
        changed.unwrap_or(Ok(())).map_err(ProbeSetError::BranchEni)
    }

    fn write(&mut self) -> Result<(), ProbeSetError> {
        self.nft.write(&self.owners.elements())?;
        self.in_use = true;
        Ok(())
    }

    /// Writes again what differs.
    pub(super) fn mend(&mut self, differences: &Differences) -> Result<(), ProbeSetError> {
        if !differences.set.is_empty() {
            self.write()?;
        }
        self.route(&differences.routing)
    }

    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = self.nft.clear()?;
        self.in_use = false;
        Ok(cleared)
    }

    /// Returns whether anything changed since the last read, as far as single requests show.
    pub(super) fn has_changed(&mut self) -> Result<bool, ProbeSetError> {
        if self.in_use && self.nft.has_changed()? {
            return Ok(true);
        }
        let changed = self.eni.as_mut().map(Eni::has_changed);
        changed
            .unwrap_or(Ok(false))
            .map_err(ProbeSetError::BranchEni)
    }

    /// Compares the node with what the pods need. Adopts ownerless elements.
    pub(super) fn read(&mut self) -> Result<Differences, ProbeSetError> {
        Ok(Differences {
            set: self.read_set()?,
            routing: self.routing_difference()?,
        })
    }

    /// Returns a sentence per difference, none if no set is needed.
    fn read_set(&mut self) -> Result<Vec<String>, ProbeSetError> {
        let Some(found) = self.nft.read()? else {
            let is_needed = self.in_use || self.owners.count() > 0;
            let missing = is_needed.then(|| "the whole set is missing".to_owned());
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
