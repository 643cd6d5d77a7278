use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::lists;
use ipnet::IpNet;

/// The limit of groups (`netconfig.v1.SidecarRedirection`; Istio's limit, services/docs/facts/istio-sidecar.md, 4.1).
const MAX_GROUPS: usize = 64;

/// The proxy connects to the application from this address, and the validation container connects to the address
/// (services/docs/facts/istio-sidecar.md, 4.7). If traffic of the address bypassed the rules, every pod would fail its
/// validation.
const PASSTHROUGH: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));

/// A numeric group id: names would differ between the node and its images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group(pub u32);

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        lists::number(text).map(Self).ok_or_else(|| {
            format!("setting sidecar_owner_groups or sidecar_excluded_owner_groups: \"{text}\" is not a group id")
        })
    }
}

/// The groups whose outbound traffic is captured; `None` means every process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerGroups(Option<BTreeSet<Group>>);

impl OwnerGroups {
    pub(super) fn to_wire(&self) -> Option<wire::GroupSelection> {
        let groups = self.0.as_ref()?.iter().map(|group| group.0);
        Some(wire::GroupSelection {
            groups: groups.collect(),
        })
    }
}

impl FromStr for OwnerGroups {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self(None));
        }
        let groups = text.split(',').map(|group| group.trim().parse());
        let groups = groups.collect::<Result<BTreeSet<Group>, _>>();
        let is_list = |groups: &BTreeSet<Group>| groups.len() <= MAX_GROUPS;
        let groups = groups.ok().filter(is_list).ok_or_else(|| {
            format!("setting sidecar_owner_groups: \"{text}\" is neither * nor a list of at most {MAX_GROUPS} group ids, separated by commas")
        })?;
        Ok(Self(Some(groups)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(IpNet);

impl Default for Loopback {
    fn default() -> Self {
        Self(IpAddr::V4(Ipv4Addr::LOCALHOST).into())
    }
}

impl fmt::Display for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Loopback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || {
            format!(
                "setting sidecar_loopback_network: \"{text}\" is not a network within 127.0.0.0/8, like 127.0.0.1/32"
            )
        };
        let network = lists::network(text).and_then(|(address, bits)| {
            let is_local = address.is_ipv4() && address.is_loopback() && bits >= 8;
            is_local.then(|| IpNet::new(address, bits).ok()).flatten()
        });
        let network = network.ok_or_else(form)?.trunc();
        if network.contains(&PASSTHROUGH) {
            return Err(format!(
                "setting sidecar_loopback_network: \"{text}\" contains {PASSTHROUGH}, which has to be captured for pods to pass their validation"
            ));
        }
        Ok(Self(network))
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
        for bad in ["", "java", "-1", "+5", "1,,2", "1 2", "4294967296", "*,1"] {
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
    fn the_loopback_is_a_part_of_127_that_leaves_the_proxys_own_address_to_the_rules() {
        assert_eq!("127.0.0.1/32".parse(), Ok(Loopback::default()));
        let halves = "127.128.0.9/9".parse::<Loopback>().unwrap();
        assert_eq!(halves.to_string(), "127.128.0.0/9");
        for bad in [
            "",
            "127.0.0.1",
            "10.0.0.0/8",
            "::1/128",
            "127.0.0.0/7",
            "127.0.0.1/33",
            "lo/8",
        ] {
            let error = bad.parse::<Loopback>().unwrap_err();
            assert!(error.contains("sidecar_loopback_network"), "{error}");
        }
        let error = "127.0.0.1/8".parse::<Loopback>().unwrap_err();
        assert!(error.contains("127.0.0.6"), "{error}");
    }
}
