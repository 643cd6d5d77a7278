//! Counts the packets between the nodes: on the bridge of their network, which no power cut empties.

use std::path::Path;

use anyhow::{Context as _, ensure};
use integration::kubernetes::Cluster;

use crate::cluster::apps::PORT;

/// Counts what pods on different nodes send each other: through ztunnels, and past them to or from an application.
pub(crate) struct Wire<'a>(&'a Cluster);

/// Packets since the counters exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packets {
    pub(crate) hbone: u64,
    pub(crate) plaintext: u64,
}

impl<'a> Wire<'a> {
    pub(crate) fn watch(cluster: &'a Cluster) -> anyhow::Result<Self> {
        let rules = format!(
            "table bridge wire
             delete table bridge wire
             table bridge wire {{
               counter hbone {{ }}
               counter plaintext {{ }}
               chain forward {{
                 type filter hook forward priority 0
                 ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 tcp dport 15008 counter name hbone
                 ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 tcp sport 15008 counter name hbone
                 ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 tcp dport {PORT} counter name plaintext
                 ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/16 tcp sport {PORT} counter name plaintext
               }}
             }}"
        );
        let wire = Self(cluster);
        wire.nft(&[&rules])?;
        Ok(wire)
    }

    fn nft(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.0.server.beside(Path::new("nft"));
        let output = command.args(arguments).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    pub(crate) fn packets(&self) -> anyhow::Result<Packets> {
        let count = |name: &str| {
            let printed = self.nft(&["list", "counter", "bridge", "wire", name])?;
            let mut words = printed
                .split_whitespace()
                .skip_while(|word| *word != "packets");
            let number = words.nth(1).and_then(|word| word.parse().ok());
            number.context("nft prints a number")
        };
        Ok(Packets {
            hbone: count("hbone")?,
            plaintext: count("plaintext")?,
        })
    }
}
