use std::{path::PathBuf, time::Duration};

use inpod_service::Key;
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::probes::{self, AwsBranchEni, ProbeMatch, SourceV4, SourceV6};

pub(crate) const KEYS: &[Key] = &[
    Key {
        name: "netns_roots",
        // /var/run may be a directory of its own; dockershim passes the third root, cri-dockerd the last.
        default: Some("/run/netns,/var/run/netns,/var/run/docker/netns,/proc"),
        help: "Directories in which a network namespace may be, separated by commas",
    },
    Key {
        name: "sweep_seconds",
        default: Some("5"),
        help: "How often to check whether network namespaces still exist whose end is not reported; all others every twelfth time",
    },
    Key {
        name: "verify_seconds",
        default: Some("300"),
        help: "How often to read each claimed netns without a change notification; holds for 75 and grows with their number",
    },
    Key {
        name: "event_buffer_bytes",
        default: Some("8388608"),
        help: "Receive buffer for kernel notifications, in bytes; when it overflows, every claimed netns is read again",
    },
    Key {
        name: "backend",
        default: Some("auto"),
        help: "How to write rules: auto or nftables, which are the same",
    },
    Key {
        name: "probe_match",
        default: Some("uid:0"),
        help: "Which packets from the node to a pod are probes, which bypass ztunnel and its policies at the ports of the pod's own probes: uid:NUMBER (from processes of the kubelet's user on the node's network), socket (from any process there), or off (probes are not exempted, and nothing is written in the node's netns)",
    },
    Key {
        name: "probe_source_v4",
        default: Some("169.254.7.127"),
        help: "Source address of IPv4 probes, as pods see them",
    },
    Key {
        name: "probe_source_v6",
        default: Some("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
        help: "Source address of IPv6 probes, as pods see them",
    },
    Key {
        name: "aws_branch_eni",
        default: Some("auto"),
        help: "Whether to add ip rules that keep probes of pods with an AWS branch ENI on the node: auto (where the node's tcp_early_demux is 0) or off",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    #[serde(deserialize_with = "inpod_service::list")]
    pub netns_roots: Vec<PathBuf>,
    #[serde(rename = "sweep_seconds", deserialize_with = "seconds")]
    pub sweep: Duration,
    /// The interval between reads of a netns without a notification.
    #[serde(rename = "verify_seconds", deserialize_with = "seconds")]
    pub verify: Duration,
    /// The size of the buffer of each of the two notification sockets, in bytes as SO_RCVBUF takes them.
    #[serde(deserialize_with = "buffer")]
    pub event_buffer_bytes: usize,
    #[serde(deserialize_with = "nftables_only")]
    pub backend: (),
    pub probe_match: ProbeMatch,
    pub probe_source_v4: SourceV4,
    pub probe_source_v6: SourceV6,
    pub aws_branch_eni: AwsBranchEni,
}

impl Config {
    pub(crate) fn probes(&self) -> probes::ProbeSettings {
        probes::ProbeSettings {
            probe_match: self.probe_match,
            source_v4: self.probe_source_v4,
            source_v6: self.probe_source_v6,
            aws_branch_eni: self.aws_branch_eni,
        }
    }
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    match u64::deserialize(deserializer)? {
        seconds @ 1..=3600 => Ok(Duration::from_secs(seconds)),
        other => Err(D::Error::custom(format!("{other} is not from 1 to 3600"))),
    }
}

/// Accepts the values of `backend` that mean nf_tables. Releases up to 0.1 could write iptables as well.
fn nftables_only<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "auto" | "nftables" => Ok(()),
        other => Err(D::Error::custom(format!(
            "{other} is neither auto nor nftables: netconfig writes rules with nf_tables only, for which the kernel \
             needs CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT and CONFIG_NFT_REDIR"
        ))),
    }
}

fn buffer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    match usize::deserialize(deserializer)? {
        bytes @ 1024..=0x4000_0000 => Ok(bytes),
        other => Err(D::Error::custom(format!(
            "{other} is not from 1024 to 1073741824"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde::de::{IntoDeserializer as _, value::Error};

    use super::*;

    #[test]
    fn another_way_to_write_rules_is_refused_with_what_the_kernel_needs() {
        let parsed = |text: &'static str| {
            nftables_only::<serde::de::value::StrDeserializer<'_, Error>>(text.into_deserializer())
        };
        assert_eq!((parsed("auto"), parsed("nftables")), (Ok(()), Ok(())));
        for other in ["iptables-nft", "iptables-legacy", "", "Auto"] {
            let error = parsed(other).unwrap_err().to_string();
            assert!(error.contains("CONFIG_NF_TABLES_INET"), "{error}");
        }
    }

    #[test]
    fn a_buffer_is_neither_so_small_that_nothing_fits_nor_more_than_a_gibibyte() {
        let parsed = |bytes: u64| {
            buffer::<serde::de::value::U64Deserializer<Error>>(bytes.into_deserializer())
        };
        assert_eq!(parsed(1024), Ok(1024));
        assert_eq!(parsed(1 << 30), Ok(1 << 30));
        for bytes in [0, 1023, (1 << 30) + 1] {
            let error = parsed(bytes).unwrap_err().to_string();
            assert!(error.contains("1024 to 1073741824"), "{error}");
        }
    }
}
