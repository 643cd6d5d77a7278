use std::{net::SocketAddr, path::Path};

use anyhow::Context as _;
use serde_json::Value;

use crate::Pod;

/// A connection in the access log of the reference ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    pub event: String,
    /// The UID of the pod in whose netns the connection was accepted.
    pub uid: String,
    pub listener: u64,
    pub destination: Option<SocketAddr>,
    pub source: Option<SocketAddr>,
    /// The identity that the other end of a tunnel proved; only in `closed` lines.
    pub peer: Option<String>,
    pub error: Option<String>,
}

impl Access {
    pub fn read(log: &Path) -> anyhow::Result<Vec<Self>> {
        let text = std::fs::read_to_string(log).with_context(|| format!("no {}", log.display()))?;
        text.lines().map(Self::parse).collect()
    }

    fn parse(line: &str) -> anyhow::Result<Self> {
        let line: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
        let text = |name: &str| line.get(name).and_then(Value::as_str).map(str::to_owned);
        Ok(Self {
            event: text("event").context("event")?,
            uid: text("uid").context("uid")?,
            listener: line
                .get("listener")
                .and_then(Value::as_u64)
                .context("listener")?,
            destination: text("original_destination").and_then(|text| text.parse().ok()),
            source: text("source").and_then(|text| text.parse().ok()),
            peer: text("peer_identity"),
            error: text("error"),
        })
    }
}

/// Returns the number of packets that the rules of a pod containing `rule` have counted.
pub fn counters(pod: &Pod, rule: &str) -> anyhow::Result<u64> {
    Ok(counted(&pod.ruleset()?, rule))
}

/// Returns the number of packets that the rules of a listing containing `rule` have counted.
pub fn counted(ruleset: &str, rule: &str) -> u64 {
    let packets = |line: &str| {
        line.split_once("counter packets ")?
            .1
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    };
    ruleset
        .lines()
        .filter(|line| line.contains(rule))
        .filter_map(packets)
        .sum()
}
