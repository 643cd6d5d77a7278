//! Nodes of a cluster: names, addresses and pod networks, which follow from a node's number.

use std::path::Path;

use serde_json::{Value, json};

use crate::pod::exec_in;

/// The network of pods on a node: the first plugins of the primary CNI's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    Bridge,
    /// A bridge, and a limit of the bandwidth by a token bucket filter.
    Bandwidth,
    /// A veth per pod and a route to the pod instead of a bridge.
    Ptp,
    /// flannel's plugin with the files and routes that flannel's backend host-gw leaves, in the oldest version of CNI
    /// that the plugin speaks.
    Flannel,
}

/// The rules by which kube-proxy translates the addresses of Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    Iptables,
    Nftables,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// From 1 to [`NodeConfig::MOST`].
    pub number: u8,
    pub chain: Chain,
    pub proxy: ProxyMode,
}

impl NodeConfig {
    /// The API server has tokens for this number of nodes.
    pub const MOST: u8 = 6;

    pub const fn new(number: u8, chain: Chain, proxy: ProxyMode) -> Self {
        Self {
            number,
            chain,
            proxy,
        }
    }

    pub fn name(&self) -> String {
        format!("node-{}", self.number)
    }

    /// Returns the last part of the machine's address; the API server has number 1.
    pub(super) fn host(&self) -> u32 {
        u32::from(self.number) + 1
    }

    pub(super) fn addresses(&self) -> [String; 2] {
        let host = self.host();
        [format!("10.78.0.{host}"), format!("fd78::{host}")]
    }

    /// Returns the ranges of the pods' addresses, one per family.
    fn pods(&self) -> [String; 2] {
        let number = self.number;
        [
            format!("10.244.{number}.0/24"),
            format!("fd44:0:0:{number}::/64"),
        ]
    }

    /// Adds routes to the pods by way of the node.
    pub(super) fn route_from(&self, netns: &Path) -> anyhow::Result<()> {
        for (pods, via) in self.pods().iter().zip(self.addresses()) {
            exec_in(netns, &["ip", "route", "add", pods, "via", &via])?;
        }
        Ok(())
    }

    /// Returns the primary network configuration.
    pub(super) fn list(&self) -> Value {
        let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
        let bandwidth = json!({"type": "bandwidth", "capabilities": {"bandwidth": true}});
        let [v4, v6] = self.pods();
        let ipam = json!({
            "type": "host-local",
            "ranges": [[{"subnet": v4}], [{"subnet": v6}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        });
        let bridge = json!({
            "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": &ipam,
        });
        let (version, plugins) = match self.chain {
            Chain::Bridge => ("1.0.0", json!([bridge, portmap])),
            Chain::Bandwidth => ("1.0.0", json!([bridge, portmap, bandwidth])),
            Chain::Ptp => ("1.0.0", json!([{"type": "ptp", "ipam": ipam}, portmap])),
            Chain::Flannel => {
                let delegate = json!({"hairpinMode": true, "isDefaultGateway": true});
                (
                    "0.3.1",
                    json!([{"type": "flannel", "delegate": delegate}, portmap]),
                )
            }
        };
        json!({"cniVersion": version, "name": super::files::NETWORK, "plugins": plugins})
    }

    /// Returns the file that flanneld writes for its plugin.
    pub(super) fn flannel(&self) -> String {
        format!(
            "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.{}.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=false\n",
            self.number
        )
    }
}

impl ProxyMode {
    pub(super) fn mode(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}
