//! The owners of each address. An address stays in the set while an owner is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The elements of the kernel's sets. The comment of an element names the owner.
pub(crate) type Elements = BTreeMap<IpAddr, String>;

/// The owner of addresses that an earlier process served, until their pods are known.
const UNKNOWN: &str = "unknown";

/// The owners of addresses. The index by owner makes a change cost the same beside any number of pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    /// The owners per address, the latest last. An address that has gone to another pod has several owners until the
    /// previous owner gives up the address. The element names the latest owner.
    by_address: BTreeMap<IpAddr, Vec<String>>,
    by_owner: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl Owners {
    /// Sets an owner's addresses. Returns the union of the previous and the new addresses.
    pub(crate) fn set(&mut self, owner: &str, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        let before = self.addresses_of(owner);
        for gone in before.difference(addresses) {
            self.remove(*gone, owner);
        }
        for new in addresses.difference(&before) {
            self.remove(*new, UNKNOWN);
            self.add(*new, owner);
        }
        before.union(addresses).copied().collect()
    }

    /// Records elements whose address has no known owner. An earlier process or another program has added them.
    pub(crate) fn adopt(&mut self, found: &Elements) {
        for (address, owner) in found {
            self.remove(*address, UNKNOWN);
            if self.owner_of(*address).is_none() {
                self.add(*address, owner);
            }
        }
    }

    /// Records addresses whose pods are not known.
    pub(crate) fn adopt_unknown(&mut self, addresses: Vec<IpAddr>) {
        let unknown = addresses.into_iter().map(|it| (it, UNKNOWN.to_owned()));
        self.adopt(&unknown.collect());
    }

    fn add(&mut self, address: IpAddr, owner: &str) {
        let owners = self.by_address.entry(address).or_default();
        owners.push(owner.to_owned());
        let addresses = self.by_owner.entry(owner.to_owned()).or_default();
        addresses.insert(address);
    }

    fn remove(&mut self, address: IpAddr, owner: &str) {
        if let Some(owners) = self.by_address.get_mut(&address) {
            owners.retain(|one| one != owner);
            if owners.is_empty() {
                self.by_address.remove(&address);
            }
        }
        if let Some(addresses) = self.by_owner.get_mut(owner) {
            addresses.remove(&address);
            if addresses.is_empty() {
                self.by_owner.remove(owner);
            }
        }
    }

    /// Returns the owner that the address's element names.
    pub(crate) fn owner_of(&self, address: IpAddr) -> Option<&str> {
        let latest = self.by_address.get(&address)?.last();
        latest.map(String::as_str)
    }

    pub(crate) fn addresses_of(&self, owner: &str) -> BTreeSet<IpAddr> {
        self.by_owner.get(owner).cloned().unwrap_or_default()
    }

    pub(crate) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.by_address.keys().copied().collect()
    }

    pub(crate) fn elements(&self) -> Elements {
        let latest =
            |(address, owners): (&IpAddr, &Vec<String>)| Some((*address, owners.last()?.clone()));
        self.by_address.iter().filter_map(latest).collect()
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.by_owner.keys().cloned().collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.by_address.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Add,
    /// Changes the owner that the element names.
    Rename,
    Delete,
}

/// Decides how to change an element that names the found owner and is to name the wanted owner.
pub(crate) fn decide_action(
    found: Option<&str>,
    wanted: Option<&str>,
    requester: &str,
) -> Option<Action> {
    match (found, wanted) {
        (None, Some(_)) => Some(Action::Add),
        (Some(found), Some(wanted)) if found != wanted => Some(Action::Rename),
        // An element that names another owner stays, because that owner has taken over the address.
        (Some(found), None) if found == requester => Some(Action::Delete),
        (Some(_) | None, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn set(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| ip(text)).collect()
    }

    #[test]
    fn what_an_owner_no_longer_names_is_touched_and_no_longer_wanted() {
        let mut owners = Owners::default();
        owners.set("a", &set(&["10.0.0.1", "fd00::1"]));
        let touched = owners.set("a", &set(&["10.0.0.1", "10.0.0.2"]));
        assert_eq!(touched, set(&["10.0.0.1", "10.0.0.2", "fd00::1"]));
        assert_eq!(owners.owner_of(ip("fd00::1")), None);
        assert_eq!(owners.addresses_of("a"), set(&["10.0.0.1", "10.0.0.2"]));
    }

    #[test]
    fn an_address_that_was_given_to_another_pod_is_the_later_ones() {
        let mut owners = Owners::default();
        owners.set("old", &set(&["10.0.0.1"]));
        owners.set("new", &set(&["10.0.0.1"]));
        // The old sandbox's rules are applied once more.
        owners.set("old", &set(&["10.0.0.1"]));
        assert_eq!(owners.owner_of(ip("10.0.0.1")), Some("new"));
        owners.set("old", &set(&[]));
        assert_eq!(owners.owner_of(ip("10.0.0.1")), Some("new"));
    }

    #[test]
    fn when_the_later_one_goes_first_the_earlier_one_has_the_address_again() {
        let mut owners = Owners::default();
        owners.set("old", &set(&["10.0.0.1"]));
        owners.set("new", &set(&["10.0.0.1"]));
        owners.set("new", &set(&[]));
        assert_eq!(owners.owner_of(ip("10.0.0.1")), Some("old"));
    }

    #[test]
    fn what_the_kernel_holds_from_before_is_remembered_and_does_not_outdo_what_is_wanted_now() {
        let mut owners = Owners::default();
        owners.set("a", &set(&["10.0.0.1"]));
        let kernel = [
            (ip("10.0.0.1"), "b".to_owned()),
            (ip("10.0.0.2"), "c".to_owned()),
        ];
        owners.adopt(&kernel.into());
        let elements = owners.elements();
        assert_eq!(elements[&ip("10.0.0.1")], "a");
        assert_eq!(elements[&ip("10.0.0.2")], "c");
        assert_eq!(owners.count(), 2);
        owners.set("c", &set(&[]));
        assert_eq!((owners.count(), owners.names().len()), (1, 1));
    }

    #[test]
    fn an_address_of_an_unknown_pod_stays_until_a_pod_is_known() {
        let mut owners = Owners::default();
        owners.adopt_unknown(vec![ip("10.0.0.1"), ip("10.0.0.2")]);
        owners.adopt(&[(ip("10.0.0.2"), "b".to_owned())].into());
        assert_eq!(owners.owner_of(ip("10.0.0.2")), Some("b"));
        owners.set("a", &set(&["10.0.0.1"]));
        assert_eq!(owners.names(), ["a", "b"].map(str::to_owned).into());
        owners.set("a", &set(&[]));
        assert_eq!(owners.addresses(), set(&["10.0.0.2"]));
    }

    #[test]
    fn only_its_owner_deletes_an_element() {
        assert_eq!(decide_action(Some("a"), None, "a"), Some(Action::Delete));
        assert_eq!(decide_action(Some("b"), None, "a"), None);
        assert_eq!(decide_action(None, None, "a"), None);
    }

    #[test]
    fn an_element_that_names_another_one_is_renamed_and_one_that_is_right_is_left_alone() {
        assert_eq!(
            decide_action(Some("b"), Some("a"), "a"),
            Some(Action::Rename)
        );
        assert_eq!(decide_action(Some("a"), Some("a"), "a"), None);
        assert_eq!(decide_action(None, Some("a"), "a"), Some(Action::Add));
    }
}
