//! The probe set as an ipset, used by an iptables rule in our chain, to which POSTROUTING jumps first.

mod text;

use std::{collections::BTreeMap, fmt, fs, io, net::IpAddr, time::Duration};

use super::{
    ProbeSetError, RunError,
    backend::{DesiredOwner, Intervals, ObservedSet, SetBackend, UpdateOutcome},
    ipset::Ipset,
    refcount::{Action, Elements, decide_action},
    selector::Selected,
    settings::ProbeSettings,
};
use crate::{backend::Variant, family::Family};
use text::{Saved, removal_script, replacement_script, rule};

/// Ours in the nat table.
const CHAIN: &str = "INPOD_POSTRT";

const HOOK: &str = "POSTROUTING";

/// One per family (IPSET_MAXNAMELEN is 32).
const SETS: [(Family, &str); 2] = [
    (Family::V4, "inpod-probes-v4"),
    (Family::V6, "inpod-probes-v6"),
];

/// NFPROTO_IPV4 and NFPROTO_IPV6 of linux/netfilter.h.
const PROTOCOL_FAMILIES: [u8; 2] = [2, 10];

/// Missing without IPv6. Of the reading thread's netns.
const DISABLE_IPV6: &str = "/proc/sys/net/ipv6/conf/all/disable_ipv6";

/// Of the sets: flushing one, and iptables-legacy, send no notification.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// For rules that send no notifications.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(500);

/// Read interval to duration of a read, to bound CPU time: iptables-legacy reads all rules, which takes long
/// with thousands of them.
const READ_COST_FACTOR: u32 = 25;

/// A runner of iptables programs of the node's variant in its netns. Waits for their lock, shared
/// with other tools (`/run/xtables.lock`).
pub trait Runner: fmt::Debug + Send {
    /// Runs `iptables-save -t nat`, or `ip6tables-save`.
    fn save(&self, family: Family) -> Result<String, RunError>;

    /// Runs `iptables-restore --noflush`, or `ip6tables-restore`. A failed script has no effect.
    fn restore(&self, family: Family, script: &str) -> Result<(), RunError>;
}

#[derive(Debug)]
pub(crate) struct Iptables {
    sets: Ipset,
    variant: Variant,
    runner: Box<dyn Runner>,
    families: &'static [Family],
    /// Our rules as this version of iptables prints them.
    printed: BTreeMap<String, String>,
    /// The cgroup that each family's rule was written for. A rule names a path, but refers to the cgroup that was
    /// there: once that is recreated, the rule looks the same.
    cgroups: BTreeMap<Family, u64>,
}

impl Iptables {
    /// Opens the calling thread's netns.
    pub(crate) fn open(variant: Variant, runner: Box<dyn Runner>) -> io::Result<Self> {
        let has_ipv6 = fs::read_to_string(DISABLE_IPV6).is_ok_and(|text| text.trim() != "1");
        Ok(Self {
            sets: Ipset::open()?,
            variant,
            runner,
            families: if has_ipv6 {
                &Family::ALL
            } else {
                &[Family::V4]
            },
            printed: BTreeMap::new(),
            cgroups: BTreeMap::new(),
        })
    }

    fn saved(&self, family: Family) -> Result<Saved, ProbeSetError> {
        Ok(Saved::parse(&self.runner.save(family)?))
    }

    fn differences(
        &self,
        family: Family,
        rule: &str,
        selected: &Selected,
        saved: &Saved,
    ) -> Vec<String> {
        let mut differences = Vec::new();
        let cgroup = cgroup_of(selected);
        if cgroup.is_some() && self.cgroups.get(&family).copied() != cgroup {
            differences.push(format!("the {family} rule may be for an earlier cgroup"));
        }
        let wanted = self.printed.get(rule).map_or(rule, String::as_str);
        if saved.rules != [wanted] {
            differences.push(format!("the {family} chain {CHAIN} is out of sync"));
        }
        if !saved.is_first || saved.jumps != 1 {
            differences.push(format!(
                "the {family} chain {HOOK} does not start with a single jump to {CHAIN}"
            ));
        }
        differences
    }

    /// Keeps a rule in sync.
    fn write_rule(
        &mut self,
        family: Family,
        rule: &str,
        selected: &Selected,
    ) -> Result<(), ProbeSetError> {
        let before = self.saved(family)?;
        let differences = self.differences(family, rule, selected, &before);
        if differences.is_empty() {
            return Ok(());
        }
        self.runner
            .restore(family, &replacement_script(&before, rule))?;
        let after = self.saved(family)?;
        if let [printed] = after.rules.as_slice() {
            self.printed.insert(rule.to_owned(), printed.clone());
        }
        if let Some(cgroup) = cgroup_of(selected) {
            self.cgroups.insert(family, cgroup);
        }
        ProbeSetError::unless_empty(self.differences(family, rule, selected, &after))
    }

    fn write_elements(&mut self, family: Family, elements: &Elements) -> Result<(), ProbeSetError> {
        let set = set_of(family);
        self.sets.create(set, family)?;
        let found = self.sets.elements(set)?.unwrap_or_default();
        let of_family = elements.iter();
        let of_family = of_family.filter(|(address, _)| Family::of(**address) == family);
        for (address, owner) in of_family {
            if found.get(address) != Some(owner) {
                self.sets.rename(set, *address, owner)?;
            }
        }
        Ok(())
    }

    /// Returns whether anything was written, `None` without a set.
    fn update_owner(
        &mut self,
        requester: &str,
        (address, wanted): DesiredOwner<'_>,
    ) -> Result<Option<bool>, ProbeSetError> {
        let set = set_of(Family::of(address));
        if let Some(owner) = wanted {
            match self.sets.add(set, address, owner) {
                Err(error) if error.is(nix::Error::ENOENT) => return Ok(None),
                Err(error) => return Err(error.into()),
                Ok(true) => return Ok(Some(true)),
                Ok(false) => {}
            }
        }
        let Some(elements) = self.sets.elements(set)? else {
            return Ok(None);
        };
        let found = elements.get(&address).map(String::as_str);
        match (decide_action(found, wanted, requester), wanted) {
            (Some(Action::Add | Action::Rename), Some(owner)) => {
                self.sets.rename(set, address, owner)?;
            }
            (Some(Action::Delete), None) => self.sets.delete(set, address)?,
            _ => return Ok(Some(false)),
        }
        Ok(Some(true))
    }
}

impl SetBackend for Iptables {
    fn families(&self) -> &'static [Family] {
        self.families
    }

    /// A rule cannot exist without a set.
    fn read(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
    ) -> Result<Option<ObservedSet>, ProbeSetError> {
        let mut found = ObservedSet::default();
        let mut missing = Vec::new();
        for family in self.families {
            match self.sets.elements(set_of(*family))? {
                Some(elements) => found.elements.extend(elements),
                None => missing.push(format!("the set {} is missing", set_of(*family))),
            }
        }
        if missing.len() == self.families.len() {
            return Ok(None);
        }
        found.differences = missing;
        for family in self.families {
            let rule = rule(selected, settings, *family);
            let saved = self.saved(*family)?;
            let differences = self.differences(*family, &rule, selected, &saved);
            found.differences.extend(differences);
        }
        Ok(Some(found))
    }

    /// Elements before the rule that uses them.
    fn write(
        &mut self,
        selected: &Selected,
        settings: &ProbeSettings,
        elements: &Elements,
    ) -> Result<(), ProbeSetError> {
        for family in self.families {
            self.write_elements(*family, elements)?;
            self.write_rule(*family, &rule(selected, settings, *family), selected)?;
        }
        Ok(())
    }

    /// Deletes the rule first: sets in use cannot be destroyed.
    fn clear(&mut self) -> Result<bool, ProbeSetError> {
        let mut cleared = false;
        let mut left = Vec::new();
        for family in self.families {
            let saved = self.saved(*family)?;
            if saved.exists {
                self.runner.restore(*family, &removal_script(&saved))?;
                cleared = true;
                if self.saved(*family)?.exists {
                    left.push(format!("the {family} chain {CHAIN} was recreated"));
                }
            }
            cleared |= self.sets.destroy(set_of(*family))?;
        }
        self.printed.clear();
        self.cgroups.clear();
        ProbeSetError::unless_empty(left)?;
        Ok(cleared)
    }

    /// An update starts by trying to add.
    fn add(
        &mut self,
        requester: &str,
        addresses: &[IpAddr],
    ) -> Result<Option<UpdateOutcome>, ProbeSetError> {
        let entry = |address: &IpAddr| (*address, Some(requester));
        let desired: Vec<_> = addresses.iter().map(entry).collect();
        self.update_owners(requester, &desired).map(Some)
    }

    fn update_owners(
        &mut self,
        requester: &str,
        desired: &[DesiredOwner<'_>],
    ) -> Result<UpdateOutcome, ProbeSetError> {
        let mut changed = false;
        for entry in desired {
            match self.update_owner(requester, *entry)? {
                None => return Ok(UpdateOutcome::SetMissing),
                Some(written) => changed |= written,
            }
        }
        Ok(UpdateOutcome::Done { changed })
    }

    /// Checks for a set that is missing, unused, or has other elements.
    fn needs_read(&mut self, elements: &Elements) -> bool {
        let families = self.families.iter();
        let mut headers = families.map(|family| {
            let wanted = elements
                .keys()
                .filter(|address| Family::of(**address) == *family);
            let wanted = u32::try_from(wanted.count()).unwrap_or(u32::MAX);
            let header = self.sets.header(set_of(*family)).ok().flatten();
            header.is_some_and(|header| header.references > 0 && header.elements == wanted)
        });
        !headers.all(|is_in_sync| is_in_sync)
    }

    fn is_relevant(&self, family: u8, table: &str, _port: u32) -> bool {
        self.variant == Variant::Nft && table == "nat" && PROTOCOL_FAMILIES.contains(&family)
    }

    fn intervals(&self, read_duration: Duration) -> Intervals {
        let read = match self.variant {
            Variant::Nft => Duration::from_secs(60),
            Variant::Legacy => {
                MIN_READ_INTERVAL.max(read_duration.saturating_mul(READ_COST_FACTOR))
            }
        };
        Intervals {
            check: CHECK_INTERVAL,
            read,
        }
    }
}

fn cgroup_of(selected: &Selected) -> Option<u64> {
    match selected {
        Selected::Cgroup(cgroup) => Some(cgroup.id),
        Selected::Socket | Selected::User(_) => None,
    }
}

fn set_of(family: Family) -> &'static str {
    let [(_, v4), (_, v6)] = SETS;
    match family {
        Family::V4 => v4,
        Family::V6 => v6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_rules_that_nobody_tells_of_takes_no_more_than_its_share() {
        let slow = Duration::from_millis(200);
        assert_eq!(
            MIN_READ_INTERVAL.max(slow.saturating_mul(READ_COST_FACTOR)),
            Duration::from_secs(5)
        );
    }
}
