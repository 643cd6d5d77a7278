//! What is known of the probe set, and what is done about it. One at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use super::{
    HostError, cgroup,
    eni::Eni,
    owners::{Elements, Owners},
    selector::{Selected, Selector, Unselected},
    settings::Settings,
    way::{Pace, Settled, Way},
};
use crate::family::Family;

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub(super) way: Box<dyn Way>,
    pub(super) settings: Settings,
    pub(super) selector: Selector,
    /// What the rule was written for, once that is known.
    selected: Option<Selected>,
    pub(super) owners: Owners,
    /// Whether something of ours is in the kernel, or belongs there.
    pub(super) in_use: bool,
    pub(super) eni: Option<Eni>,
}

impl State {
    pub(super) fn new(way: Box<dyn Way>, settings: Settings, eni: Option<Eni>) -> Self {
        Self {
            way,
            selector: Selector::new(settings.probe_match.clone()),
            settings,
            selected: None,
            owners: Owners::default(),
            in_use: false,
            eni,
        }
    }

    /// Makes what an owner wants exactly this, in the kernel too. Whether anything had to be written.
    pub(super) fn set(
        &mut self,
        owner: &str,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<bool, HostError> {
        let owned = |address| self.owners.owner_of(address).is_some();
        let is_new = !addresses.iter().copied().any(owned);
        let touched = self.owners.set(owner, addresses);
        if touched.is_empty() {
            return Ok(false);
        }
        let is_new = is_new && touched.len() == addresses.len();
        let families = self.way.families();
        let touched: Vec<_> = touched.into_iter().collect();
        let held = touched
            .iter()
            .filter(|address| families.contains(&Family::of(**address)));
        let wishes = held.map(|address| (*address, self.owners.owner_of(*address)));
        let wishes: Vec<_> = wishes.collect();
        let is_wanted = wishes.iter().any(|(_, wanted)| wanted.is_some());
        let added = if is_new {
            let addresses: Vec<_> = wishes.iter().map(|(address, _)| *address).collect();
            self.way.add(owner, &addresses)?
        } else {
            None
        };
        let settled = match added {
            Some(settled) => settled,
            None => self.way.settle(owner, &wishes)?,
        };
        let changed = match settled {
            Settled::Done { changed } => changed,
            Settled::Gone if is_wanted => {
                self.write()?;
                true
            }
            Settled::Gone => false,
        };
        self.in_use |= is_wanted;
        Ok(self.lead(&touched)? || changed)
    }

    /// Leads probes of pods with an interface of AWS's own there.
    fn lead(&mut self, touched: &[IpAddr]) -> Result<bool, HostError> {
        let Some(eni) = &mut self.eni else {
            return Ok(false);
        };
        let wanted = |address: &IpAddr| self.owners.owner_of(*address).is_some();
        let (named, gone): (BTreeSet<_>, BTreeSet<_>) = touched.iter().copied().partition(wanted);
        eni.settle(&named, &gone)
    }

    /// Writes all of it.
    pub(super) fn write(&mut self) -> Result<(), HostError> {
        let selected = self.selected(true)?;
        let elements = self.elements();
        let (way, settings) = (&mut self.way, &self.settings);
        let mut write = || way.write(&selected, settings, &elements);
        match &selected {
            Selected::Cgroup(_) => cgroup::as_seen(write).map_err(HostError::View)??,
            Selected::Socket | Selected::User(_) => write()?,
        }
        self.in_use = true;
        Ok(())
    }

    /// Takes all of it away. Whether anything was there.
    pub(super) fn clear(&mut self) -> Result<bool, HostError> {
        let cleared = match self.selected(false) {
            // As for writing: iptables resolves the path of the cgroup that its rule names.
            Ok(Selected::Cgroup(_)) => {
                cgroup::as_seen(|| self.way.clear()).map_err(HostError::View)??
            }
            Ok(Selected::Socket | Selected::User(_)) | Err(_) => self.way.clear()?,
        };
        self.in_use = false;
        Ok(cleared)
    }

    /// Reads all of it: what is not as it should be, a sentence each, and how many elements were found. Elements that
    /// nobody here wants are remembered. `None` where nothing of ours is there.
    pub(super) fn read(&mut self) -> Result<Option<Vec<String>>, HostError> {
        let selected = self.selected(false);
        // Elements are read also where it is not known what the rule is to be.
        let compared = selected.as_ref().unwrap_or(&Selected::Socket);
        let Some(found) = self.way.read(compared, &self.settings)? else {
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
                "{missing} addresses are missing or not named right"
            ));
        }
        Ok(Some(differences))
    }

    /// What is to be in the kernel, as far as it can hold it.
    pub(super) fn elements(&self) -> Elements {
        let families = self.way.families();
        let elements = self.owners.elements().into_iter();
        let held = elements.filter(|(address, _)| families.contains(&Family::of(*address)));
        held.collect::<BTreeMap<_, _>>()
    }

    /// Whose packets are probes: as it was the last time, where that is known.
    fn selected(&mut self, is_urgent: bool) -> Result<Selected, Unselected> {
        if let Some(known) = &self.selected {
            return Ok(known.clone());
        }
        let found = self.selector.select(is_urgent);
        let found = found.unwrap_or(Err(Unselected::NoKubelet))?;
        self.selected = Some(found.clone());
        Ok(found)
    }

    /// Looks again whose packets are probes. `true` where that is not what was known. What was known stays where
    /// nothing is found: a kubelet that is started anew is most likely the same one.
    pub(super) fn reselect(&mut self) -> Option<Result<bool, Unselected>> {
        let found = match self.selector.select(false)? {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let is_other = self.selected.as_ref() != Some(&found);
        self.selected = Some(found);
        Some(Ok(is_other))
    }

    pub(super) fn is_suspicious(&mut self) -> bool {
        let elements = self.elements();
        self.in_use && self.way.is_suspicious(&elements)
    }

    pub(super) fn pace(&self, took: Duration) -> Pace {
        self.way.pace(took)
    }
}
