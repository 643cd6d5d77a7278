//! Owners of each address. It stays while one is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Owners are comments of the kernel's elements.
pub(crate) type Elements = BTreeMap<IpAddr, String>;

/// The owners per address: several while an address has gone to another pod and its previous owner is known; the
/// element is named after the latest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    owners_of_address: BTreeMap<IpAddr, Vec<String>>,
    addresses_of_owner: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl Owners {
    /// Returns the union of previous and new addresses.
    pub(crate) fn set(&mut self, owner: &str, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        let before = self.addresses_of_owner.remove(owner).unwrap_or_default();
        for gone in before.difference(addresses) {
            if let Some(owners) = self.owners_of_address.get_mut(gone) {
                owners.retain(|one| one != owner);
                if owners.is_empty() {
                    self.owners_of_address.remove(gone);
                }
            }
        }
        for new in addresses.difference(&before) {
            self.owners_of_address
                .entry(*new)
                .or_default()
                .push(owner.to_owned());
        }
        if !addresses.is_empty() {
            self.addresses_of_owner
                .insert(owner.to_owned(), addresses.clone());
        }
        before.union(addresses).copied().collect()
    }

    /// Records ownerless elements, added by an earlier process or another one.
    pub(crate) fn adopt(&mut self, found: &Elements) {
        for (address, owner) in found {
            if !self.owners_of_address.contains_key(address) {
                self.owners_of_address.insert(*address, vec![owner.clone()]);
                let addresses = self.addresses_of_owner.entry(owner.clone()).or_default();
                addresses.insert(*address);
            }
        }
    }

    /// Returns the owner that the element is named after.
    pub(crate) fn owner_of(&self, address: IpAddr) -> Option<&str> {
        self.owners_of_address
            .get(&address)?
            .last()
            .map(String::as_str)
    }

    pub(crate) fn addresses_of(&self, owner: &str) -> BTreeSet<IpAddr> {
        self.addresses_of_owner
            .get(owner)
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn elements(&self) -> Elements {
        let owned = |(address, owners): (&IpAddr, &Vec<String>)| {
            owners.last().map(|owner| (*address, owner.clone()))
        };
        self.owners_of_address.iter().filter_map(owned).collect()
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.addresses_of_owner.keys().cloned().collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.owners_of_address.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Add,
    /// Changes the owner's name.
    Rename,
    Delete,
}

/// Compares the owner found in the kernel with the wanted one.
pub(crate) fn decide_action(
    found: Option<&str>,
    wanted: Option<&str>,
    requester: &str,
) -> Option<Action> {
    match (found, wanted) {
        (None, Some(_)) => Some(Action::Add),
        (Some(found), Some(wanted)) if found != wanted => Some(Action::Rename),
        // Not if another owner took it over.
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
        // The old sandbox's rules, once more.
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
