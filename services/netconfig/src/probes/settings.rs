use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::Deserialize;

/// XT_CGROUP_PATH_MAX of linux/netfilter/xt_cgroup.h, with the final zero.
const MAX_PATH_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSettings {
    pub probe_match: ProbeMatch,
    /// Of IPv4 probes, as pods see it.
    pub source_v4: SourceV4,
    /// Of IPv6 probes, as pods see it.
    pub source_v6: SourceV6,
    pub aws_branch_eni: AwsBranchEni,
}

impl ProbeSettings {
    /// Returns sources that pods' rules do not capture; none if probes are not exempted.
    pub fn sources(&self) -> Vec<IpAddr> {
        match self.probe_match {
            ProbeMatch::Off => Vec::new(),
            ProbeMatch::Socket
            | ProbeMatch::Kubelet
            | ProbeMatch::Uid(_)
            | ProbeMatch::Cgroup(_) => {
                vec![self.source_v4.0.into(), self.source_v6.0.into()]
            }
        }
    }
}

/// As Istio with iptables (services/docs/facts/istio-ambient.md, 6.7).
impl Default for ProbeSettings {
    fn default() -> Self {
        Self {
            probe_match: ProbeMatch::Socket,
            source_v4: SourceV4(Ipv4Addr::new(169, 254, 7, 127)),
            source_v6: SourceV6(Ipv6Addr::new(
                0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff,
            )),
            aws_branch_eni: AwsBranchEni::Auto,
        }
    }
}

/// The packets to pods' addresses that are probes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ProbeMatch {
    /// From any socket of the node's netns.
    Socket,
    /// From the kubelet's user only.
    Kubelet,
    Uid(u32),
    /// From sockets opened in this cgroup, or below it.
    Cgroup(CgroupPath),
    /// None. Writes nothing in the node's netns.
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProbeMatch {
    #[error("is none of socket, kubelet, uid:NUMBER, cgroup:PATH, off")]
    Unknown,
    #[error("has no valid user id (0 to 4294967294)")]
    Uid,
    #[error(
        "has no valid cgroup: expected a path below the root of cgroup2, such as system.slice/kubelet.service"
    )]
    Cgroup,
}

impl FromStr for ProbeMatch {
    type Err = InvalidProbeMatch;

    fn from_str(text: &str) -> Result<Self, InvalidProbeMatch> {
        match text.split_once(':') {
            None => match text {
                "socket" => Ok(Self::Socket),
                "kubelet" => Ok(Self::Kubelet),
                "off" => Ok(Self::Off),
                _ => Err(InvalidProbeMatch::Unknown),
            },
            Some(("uid", user)) => {
                let user = user.parse().ok().filter(|user| *user != u32::MAX);
                user.map(Self::Uid).ok_or(InvalidProbeMatch::Uid)
            }
            Some(("cgroup", path)) => {
                let path = CgroupPath::parse(path).ok_or(InvalidProbeMatch::Cgroup)?;
                Ok(Self::Cgroup(path))
            }
            Some(_) => Err(InvalidProbeMatch::Unknown),
        }
    }
}

impl TryFrom<String> for ProbeMatch {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|why| format!("{text:?} {why}"))
    }
}

impl fmt::Display for ProbeMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket => f.write_str("socket"),
            Self::Kubelet => f.write_str("kubelet"),
            Self::Uid(user) => write!(f, "uid:{user}"),
            Self::Cgroup(path) => write!(f, "cgroup:{}", path.as_str()),
            Self::Off => f.write_str("off"),
        }
    }
}

/// A path below the root of cgroup2, without a slash at either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupPath(String);

impl CgroupPath {
    /// Rejects quotes and white space, which would break iptables' script, and the root,
    /// which contains all processes.
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('/').unwrap_or(text).trim_end_matches('/');
        let is_part = |part: &str| {
            let is_allowed = |byte: u8| byte.is_ascii_graphic() && byte != b'"';
            !matches!(part, "" | "." | "..") && part.bytes().all(is_allowed)
        };
        let fits = text.len() < MAX_PATH_BYTES;
        (fits && text.split('/').all(is_part)).then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn level(&self) -> u32 {
        u32::try_from(self.0.split('/').count()).unwrap_or(u32::MAX)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SourceV4(pub(crate) Ipv4Addr);

impl TryFrom<String> for SourceV4 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let address = text.parse().ok();
        let address = address.filter(|found: &Ipv4Addr| {
            !(found.is_unspecified()
                || found.is_loopback()
                || found.is_multicast()
                || found.is_broadcast())
        });
        address
            .map(Self)
            .ok_or_else(|| invalid_source(&text, "IPv4"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SourceV6(pub(crate) Ipv6Addr);

impl TryFrom<String> for SourceV6 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let address = text.parse().ok();
        let address = address.filter(|found: &Ipv6Addr| {
            !(found.is_unspecified()
                || found.is_loopback()
                || found.is_multicast()
                || found.to_ipv4_mapped().is_some())
        });
        address
            .map(Self)
            .ok_or_else(|| invalid_source(&text, "IPv6"))
    }
}

fn invalid_source(text: &str, family: &str) -> String {
    format!("{text:?} is not a valid {family} source address")
}

/// The ip rules of pods with an AWS branch ENI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AwsBranchEni {
    /// Only with `net.ipv4.tcp_early_demux` at 0.
    #[default]
    Auto,
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_tell_probes_is_read_as_it_is_written() {
        for text in ["socket", "kubelet", "uid:0", "uid:4711", "off"] {
            assert_eq!(text.parse::<ProbeMatch>().unwrap().to_string(), text);
        }
        let cgroup: ProbeMatch = "cgroup:/system.slice/kubelet.service/".parse().unwrap();
        assert_eq!(cgroup.to_string(), "cgroup:system.slice/kubelet.service");
        let ProbeMatch::Cgroup(path) = cgroup else {
            panic!("{cgroup}");
        };
        assert_eq!(path.level(), 2);
    }

    #[test]
    fn what_names_nobody_or_everybody_is_refused() {
        for bad in [
            "",
            "Socket",
            "uid",
            "uid:",
            "uid:-1",
            "uid:4294967295",
            "cgroup:",
            "cgroup:/",
            "cgroup:a/../b",
            "cgroup:a//b",
            "cgroup:a b",
            "cgroup:a\nb",
            "cgroup:a\"b",
            "gid:0",
        ] {
            assert!(bad.parse::<ProbeMatch>().is_err(), "{bad:?}");
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
