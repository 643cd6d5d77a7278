//! The probe set's state and its changes, under a lock.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use super::{
    ProbeSetError, cgroup,
    eni::Eni,
    nft::{Nft, UpdateOutcome},
    refcount::{Elements, Owners},
    selector::{Selected, Selector},
    settings::{ProbeMatch, ProbeSettings},
};
use crate::error::SelectError;

/// Of reads without a reason. Every change of a table is notified.
pub(super) const READ_INTERVAL: Duration = Duration::from_secs(60);

/// For a kubelet that restarts as another user, or in another cgroup.
const SELECTION_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct State {
    pub(super) nft: Nft,
    pub(super) settings: ProbeSettings,
    pub(super) selector: Selector,
    /// Of the written rule, once known.
    selected: Option<Selected>,
    pub(super) owners: Owners,
    /// The kernel has elements or a rule of ours, or should.
    pub(super) in_use: bool,
    pub(super) eni: Option<Eni>,
}

impl State {
    pub(super) fn new(nft: Nft, settings: ProbeSettings, eni: Option<Eni>) -> Self {
        Self {
            nft,
            selector: Selector::new(settings.probe_match.clone()),
            settings,
            selected: None,
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
        let selected = self.selected(true)?;
        let elements = self.elements();
        let (nft, settings) = (&mut self.nft, &self.settings);
        let mut write = || nft.write(&selected, settings, &elements);
        match &selected {
            Selected::Cgroup(_) => {
                cgroup::in_host_cgroup_namespace(write).map_err(ProbeSetError::View)??;
            }
            Selected::Socket | Selected::User(_) => write()?,
        }
        self.in_use = true;
        Ok(())
    }

    pub(super) fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let cleared = self.nft.clear()?;
        self.in_use = false;
        Ok(cleared)
    }

    /// Returns a sentence per difference, `None` without a set of ours. Adopts ownerless elements.
    pub(super) fn read(&mut self) -> Result<Option<Vec<String>>, ProbeSetError> {
        let selected = self.selected(false);
        // Elements are read even if the right rule is unknown.
        let compared = selected.as_ref().unwrap_or(&Selected::Socket);
        let Some(found) = self.nft.read(compared, &self.settings)? else {
            return Ok(None);
        };
        self.owners.adopt(&found.elements);
        self.in_use = true;
        selected?;
        let mut differences = found.differences;
        let wanted = self.elements();
        let is_missing =
            |(address, owner): &(&IpAddr, &String)| found.elements.get(*address) != Some(*owner);
        let missing = wanted.iter().filter(is_missing).count();
        if missing > 0 {
            differences.push(format!(
                "{missing} addresses are missing or have the wrong owner"
            ));
        }
        Ok(Some(differences))
    }

    pub(super) fn elements(&self) -> Elements {
        self.owners.elements()
    }

    /// Prefers the one known from before.
    fn selected(&mut self, is_urgent: bool) -> Result<Selected, SelectError> {
        if let Some(known) = &self.selected {
            return Ok(known.clone());
        }
        let found = self.selector.select(is_urgent);
        let found = found.unwrap_or(Err(SelectError::NoKubelet))?;
        self.selected = Some(found.clone());
        Ok(found)
    }

    /// Returns whether the sender changed. If none is found, the last one stays: a restarted kubelet most likely
    /// has the same user.
    pub(super) fn refresh_selection(&mut self) -> Option<Result<bool, SelectError>> {
        let found = match self.selector.select(false)? {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let is_other = self.selected.as_ref() != Some(&found);
        self.selected = Some(found);
        Some(Ok(is_other))
    }

    /// Returns the time between two checks. Checks more often where the sender of probes may change.
    pub(super) fn check_interval(&self) -> Duration {
        if self.settings.probe_match == ProbeMatch::Socket {
            READ_INTERVAL
        } else {
            SELECTION_CHECK_INTERVAL
        }
    }
}
