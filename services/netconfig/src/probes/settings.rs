use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::Deserialize;

use crate::{family::Family, rules::Expr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeSettings {
    pub probe_match: ProbeMatch,
    /// The source address that pods see on IPv4 probes.
    pub source_v4: SourceV4,
    /// The source address that pods see on IPv6 probes.
    pub source_v6: SourceV6,
    pub aws_branch_eni: AwsBranchEni,
}

impl ProbeSettings {
    /// Returns the sources that pods' rules do not capture; the list is empty if probes are not exempted.
    pub fn sources(&self) -> Vec<IpAddr> {
        if self.probe_match == ProbeMatch::Off {
            return Vec::new();
        }
        Family::ALL.map(|family| self.source(family)).into()
    }

    pub(crate) fn source(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.source_v4.0.into(),
            Family::V6 => self.source_v6.0.into(),
        }
    }
}

/// The sources are Istio's (services/docs/facts/istio-ambient.md, 6.7). Istio with iptables exempts any socket of the
/// node; kubelets are root, and no other user of the node may bypass ztunnel.
impl Default for ProbeSettings {
    fn default() -> Self {
        Self {
            probe_match: ProbeMatch::Uid(0),
            source_v4: SourceV4(Ipv4Addr::new(169, 254, 7, 127)),
            source_v6: SourceV6(Ipv6Addr::new(
                0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff,
            )),
            aws_branch_eni: AwsBranchEni::Auto,
        }
    }
}

/// The senders whose packets to pods' addresses count as probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ProbeMatch {
    /// Any socket of the node's netns.
    Socket,
    /// The sockets of this user.
    Uid(u32),
    /// No sender. netconfig writes nothing in the node's netns.
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProbeMatch {
    #[error("is none of socket, uid:NUMBER, off")]
    Unknown,
    #[error("has no valid user id (0 to 4294967294)")]
    Uid,
    /// A value of releases up to 0.1.
    #[error("was removed: set uid:NUMBER with the user id of the kubelet, mostly uid:0, or socket")]
    Removed,
}

impl ProbeMatch {
    /// Returns the condition on a packet's sender, or `None` if no packet is a probe.
    pub(crate) fn sender(self) -> Option<Expr> {
        match self {
            Self::Socket => Some(Expr::FromAnySocket),
            Self::Uid(user) => Some(Expr::FromUser(user)),
            Self::Off => None,
        }
    }
}

impl FromStr for ProbeMatch {
    type Err = InvalidProbeMatch;

    fn from_str(text: &str) -> Result<Self, InvalidProbeMatch> {
        match text.split_once(':') {
            None if text == "socket" => Ok(Self::Socket),
            None if text == "off" => Ok(Self::Off),
            None if text == "kubelet" => Err(InvalidProbeMatch::Removed),
            Some(("cgroup", _)) => Err(InvalidProbeMatch::Removed),
            Some(("uid", user)) => {
                let user = user.parse().ok().filter(|user| *user != u32::MAX);
                user.map(Self::Uid).ok_or(InvalidProbeMatch::Uid)
            }
            _ => Err(InvalidProbeMatch::Unknown),
        }
    }
}

impl TryFrom<String> for ProbeMatch {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|why| format!("{text:?} {why}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SourceV4(pub(crate) Ipv4Addr);

impl TryFrom<String> for SourceV4 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_allowed = |found: Ipv4Addr| !found.is_broadcast();
        parse_source(&text, "IPv4", is_allowed).map(Self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SourceV6(pub(crate) Ipv6Addr);

impl TryFrom<String> for SourceV6 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_allowed = |found: Ipv6Addr| found.to_ipv4_mapped().is_none();
        parse_source(&text, "IPv6", is_allowed).map(Self)
    }
}

fn parse_source<T: FromStr + Copy + Into<IpAddr>>(
    text: &str,
    family: &str,
    is_allowed: impl Fn(T) -> bool,
) -> Result<T, String> {
    let is_valid = |found: &T| {
        let address: IpAddr = (*found).into();
        let is_special = address.is_unspecified() || address.is_loopback();
        !is_special && !address.is_multicast() && is_allowed(*found)
    };
    let found = text.parse().ok().filter(is_valid);
    found.ok_or_else(|| format!("{text:?} is not a valid {family} source address"))
}

/// The setting of the ip rules for pods with an AWS branch ENI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AwsBranchEni {
    /// Writes the rules where `net.ipv4.tcp_early_demux` is 0.
    #[default]
    Auto,
    /// Writes no rules.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_match_names_a_sender_and_a_removed_value_names_its_successor() {
        let parse = str::parse::<ProbeMatch>;
        assert_eq!(parse("socket"), Ok(ProbeMatch::Socket));
        assert_eq!(parse("uid:4711"), Ok(ProbeMatch::Uid(4711)));
        assert_eq!(parse("off"), Ok(ProbeMatch::Off));
        for bad in ["", "Socket", "uid", "uids:0", "gid:0"] {
            assert_eq!(parse(bad), Err(InvalidProbeMatch::Unknown), "{bad:?}");
        }
        for bad in ["uid:", "uid:-1", "uid:4294967295"] {
            assert_eq!(parse(bad), Err(InvalidProbeMatch::Uid), "{bad:?}");
        }
        for removed in ["kubelet", "cgroup:system.slice/kubelet.service"] {
            let error = parse(removed).unwrap_err().to_string();
            assert!(error.contains("uid:0"), "{error}");
        }
    }

    #[test]
    fn a_source_that_nothing_comes_from_is_refused() {
        for bad in ["", "127.0.0.1", "0.0.0.0", "224.0.0.1", "fd00::1"] {
            assert!(SourceV4::try_from(bad.to_owned()).is_err(), "{bad}");
        }
        for bad in ["", "::1", "::", "ff02::1", "::ffff:10.0.0.1", "10.0.0.1"] {
            assert!(SourceV6::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn where_nothing_is_done_nothing_is_spared() {
        let settings = ProbeSettings::default();
        assert_eq!(settings.sources().len(), 2);
        let off = ProbeSettings {
            probe_match: ProbeMatch::Off,
            ..settings
        };
        assert_eq!(
            off.sources(),
            [""; 0].map(|_| IpAddr::V4(Ipv4Addr::LOCALHOST))
        );
    }
}
