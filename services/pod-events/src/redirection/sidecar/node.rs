use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{
    lists::{self, MAX_ENTRIES},
    parse_digits,
    redirection::{Loopback, Network, Owner},
};

/// The proxy connects to the application from this address, and the validation container connects to the address
/// (services/docs/facts/istio-sidecar.md, 4.7). If traffic of the address bypassed the rules, every pod would fail its
/// validation.
const PASSTHROUGH: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));

/// A numeric group id: names would differ between the node and its images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group(Owner);

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let owner = parse_digits(text).and_then(Owner::new);
        owner.map(Self).ok_or_else(|| {
            format!("setting sidecar_owner_groups or sidecar_excluded_owner_groups: \"{text}\" is not a group id")
        })
    }
}

pub(super) fn group_numbers(groups: &[Group]) -> Vec<u32> {
    groups.iter().map(|group| group.0.number()).collect()
}

/// The groups whose outbound traffic is captured; `None` means every process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerGroups(Option<Vec<Group>>);

impl OwnerGroups {
    pub(super) fn to_wire(&self) -> Option<wire::GroupSelection> {
        let groups = group_numbers(self.0.as_ref()?);
        Some(wire::GroupSelection { groups })
    }
}

impl FromStr for OwnerGroups {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self(None));
        }
        let groups = text.split(',').map(str::trim);
        let group = |text: &str| text.parse().ok();
        let groups = lists::list(groups, group, MAX_ENTRIES, Default::default());
        groups.map(|groups| Self(Some(groups))).map_err(|_| {
            format!("setting sidecar_owner_groups: \"{text}\" is neither * nor a list of at most {MAX_ENTRIES} group ids, separated by commas")
        })
    }
}

/// The node's setting of the pods' own loopback network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeLoopback(Loopback);

impl fmt::Display for NodeLoopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.network().fmt(f)
    }
}

impl FromStr for NodeLoopback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let loopback = Network::truncated(text).ok();
        let loopback = loopback.and_then(|network| Loopback::try_from(network).ok());
        let loopback = loopback.ok_or_else(|| {
            format!(
                "setting sidecar_loopback_network: \"{text}\" is not a network within 127.0.0.0/8, like 127.0.0.1/32"
            )
        })?;
        if loopback.network().contains(PASSTHROUGH) {
            return Err(format!(
                "setting sidecar_loopback_network: \"{text}\" contains {PASSTHROUGH}, which has to be captured for pods to pass their validation"
            ));
        }
        Ok(Self(loopback))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_all_or_numbers_and_never_none() {
        assert_eq!("*".parse(), Ok(OwnerGroups(None)));
        let two = "202, 888".parse::<OwnerGroups>().unwrap();
        assert_eq!(two.to_wire().unwrap().groups, [202, 888]);
        for bad in ["", "java", "-1", "+5", "1,,2", "1 2", "4294967295", "*,1"] {
            let error = bad.parse::<OwnerGroups>().unwrap_err();
            assert!(
                error.contains("sidecar_owner_groups") && error.contains(bad),
                "{error}"
            );
        }
        let many: Vec<_> = (0..65).map(|n: u32| n.to_string()).collect();
        many.join(",").parse::<OwnerGroups>().unwrap_err();
        "ftp".parse::<Group>().unwrap_err();
    }

    #[test]
    fn the_loopback_is_within_127_and_without_the_proxys_address() {
        assert_eq!("127.0.0.1/32".parse(), Ok(NodeLoopback::default()));
        let halves = "127.128.0.9/9".parse::<NodeLoopback>().unwrap();
        assert_eq!(halves.to_string(), "127.128.0.0/9");
        for bad in ["", "127.0.0.1", "10.0.0.0/8", "127.0.0.0/7"] {
            let error = bad.parse::<NodeLoopback>().unwrap_err();
            assert!(error.contains("sidecar_loopback_network"), "{error}");
        }
        let error = "127.0.0.1/8".parse::<NodeLoopback>().unwrap_err();
        assert!(error.contains("127.0.0.6"), "{error}");
    }
}
