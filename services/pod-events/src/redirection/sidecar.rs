//! The redirection to a proxy in the pod. The pod's annotations are parsed as in Istio's plugin
//! (services/docs/facts/istio-sidecar.md, 3.3 and 3.4). `services/docs/sidecars.md` lists the quirks that are kept and
//! the quirks that are not.

mod node;

use std::{fmt::Display, num::NonZeroU16};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{
    keys,
    lists::{InvalidList, NEVER_CAPTURED, excluded_inbound, interfaces, networks, ports},
    redirection::{InboundCapture, InterfaceName, Network, Selection},
};
use serde::{Deserialize, Serialize};

use super::{Capture, Malformed, joined, malformed, numbers, texts};

pub use node::{Group, NodeLoopback, OwnerGroups};

/// The default of the excluded outbound ports (services/docs/facts/istio-sidecar.md, 3.4).
const OUTBOUND_DEFAULT: &str = "15020";

/// The text of a selection of everything.
const ALL: &str = "all";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proxy {
    pub uid: u32,
    pub gid: u32,
    /// The proxy serves DNS for the pod.
    pub dns: bool,
    /// Packets in conntrack state INVALID are dropped.
    pub drop_invalid: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    pub proxy: Proxy,
    pub inbound: InboundCapture,
    pub inbound_ports: Selection<NonZeroU16>,
    /// Ports not captured when all other ports are captured.
    pub excluded_inbound_ports: Vec<NonZeroU16>,
    pub outbound_networks: Selection<Network>,
    pub excluded_outbound_networks: Vec<Network>,
    /// TCP destination ports captured in any network.
    pub outbound_ports: Vec<NonZeroU16>,
    pub excluded_outbound_ports: Vec<NonZeroU16>,
    pub excluded_interfaces: Vec<InterfaceName>,
    /// Interfaces whose incoming TCP is treated as outbound.
    pub virtual_interfaces: Vec<InterfaceName>,
}

impl Sidecar {
    /// Parses the annotations in the order of Istio's plugin, so that the same annotation is reported if several are
    /// malformed.
    pub fn from_annotations<'a>(
        proxy: Proxy,
        text: impl Fn(&'static str) -> Option<&'a str>,
    ) -> Result<Self, Malformed> {
        let value = |name, default| (name, text(name).unwrap_or(default));
        // Even an empty annotation overrides the older annotation.
        let newer = text(keys::REROUTE_VIRTUAL_INTERFACES);
        let newer = newer.map(|names| (keys::REROUTE_VIRTUAL_INTERFACES, names));
        let older = || value(keys::SIDECAR_KUBEVIRT_INTERFACES, "");
        let virtual_interfaces = newer.unwrap_or_else(older);
        let outbound = value(keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, OUTBOUND_DEFAULT);
        Ok(Self {
            proxy,
            inbound: inbound(text(keys::INTERCEPTION_MODE))?,
            outbound_networks: all_or(networks, value(keys::SIDECAR_INCLUDE_NETWORKS, "*"))?,
            excluded_outbound_networks: list(networks, value(keys::SIDECAR_EXCLUDE_NETWORKS, ""))?,
            excluded_inbound_ports: list(
                excluded_inbound,
                value(keys::SIDECAR_EXCLUDE_INBOUND_PORTS, ""),
            )?,
            inbound_ports: all_or(ports, value(keys::SIDECAR_INCLUDE_INBOUND_PORTS, "*"))?,
            excluded_outbound_ports: list(ports, outbound)?,
            outbound_ports: list(ports, value(keys::SIDECAR_INCLUDE_OUTBOUND_PORTS, ""))?,
            excluded_interfaces: list(interfaces, value(keys::SIDECAR_EXCLUDE_INTERFACES, ""))?,
            virtual_interfaces: list(interfaces, virtual_interfaces)?,
        })
    }

    /// Lists exclusions by the pod's annotations, as `(annotation, text)`, without ports that are never captured.
    pub fn exclusions(&self) -> impl Iterator<Item = (&'static str, String)> {
        let other_than = |ports: &[NonZeroU16], implied: &[u16]| {
            let others = ports.iter().filter(|port| !implied.contains(&port.get()));
            joined(others)
        };
        let inbound = other_than(&self.excluded_inbound_ports, &NEVER_CAPTURED);
        let outbound = other_than(&self.excluded_outbound_ports, &[NEVER_CAPTURED[0]]);
        let lists = [
            (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, inbound),
            (
                keys::SIDECAR_EXCLUDE_NETWORKS,
                joined(&self.excluded_outbound_networks),
            ),
            (keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, outbound),
            (
                keys::SIDECAR_EXCLUDE_INTERFACES,
                joined(&self.excluded_interfaces),
            ),
        ];
        lists.into_iter().filter(|(_, text)| !text.is_empty())
    }

    /// Lists the annotations that limit the redirection to some ports or networks, as `(annotation, text)`.
    pub fn limits(&self) -> impl Iterator<Item = (&'static str, String)> {
        let (ports, networks) = (&self.inbound_ports, &self.outbound_networks);
        let ports = (keys::SIDECAR_INCLUDE_INBOUND_PORTS, described(ports));
        let networks = (keys::SIDECAR_INCLUDE_NETWORKS, described(networks));
        let limits = [ports, networks].into_iter();
        limits.filter(|(_, text)| text != ALL)
    }

    /// Describes the redirection as names and values.
    pub fn describe(&self) -> Vec<(String, String)> {
        let proxy = &self.proxy;
        let mode = match self.inbound {
            InboundCapture::Redirect => keys::INTERCEPTION_REDIRECT,
            InboundCapture::Tproxy => keys::INTERCEPTION_TPROXY,
        };
        let lists = [
            ("user and group", format!("{}, {}", proxy.uid, proxy.gid)),
            ("interception mode", mode.to_owned()),
            ("inbound ports", described(&self.inbound_ports)),
            (
                "excluded inbound ports",
                joined(&self.excluded_inbound_ports),
            ),
            ("outbound networks", described(&self.outbound_networks)),
            (
                "excluded outbound networks",
                joined(&self.excluded_outbound_networks),
            ),
            (
                "outbound ports of any network",
                joined(&self.outbound_ports),
            ),
            (
                "excluded outbound ports",
                joined(&self.excluded_outbound_ports),
            ),
            ("excluded interfaces", joined(&self.excluded_interfaces)),
            ("virtual interfaces", joined(&self.virtual_interfaces)),
            ("DNS", proxy.dns.to_string()),
            ("drops INVALID packets", proxy.drop_invalid.to_string()),
        ];
        let named = |(name, value)| (format!("sidecar: {name}"), value);
        lists.into_iter().map(named).collect()
    }

    pub fn to_wire(&self, node: &Capture) -> wire::SidecarRedirection {
        wire::SidecarRedirection {
            inbound_capture: wire::InboundCapture::from(self.inbound).into(),
            ipv6: wire::Ipv6Capture::from(node.ipv6).into(),
            proxy_uids: vec![self.proxy.uid],
            proxy_gids: vec![self.proxy.gid],
            inbound_ports: listed(&self.inbound_ports).map(|these| wire::PortSelection {
                all: these.is_none(),
                ports: these.map(numbers).unwrap_or_default(),
            }),
            excluded_inbound_ports: numbers(&self.excluded_inbound_ports),
            outbound_networks: listed(&self.outbound_networks).map(|these| {
                wire::NetworkSelection {
                    all: these.is_none(),
                    networks: these.map(texts).unwrap_or_default(),
                }
            }),
            excluded_outbound_networks: texts(&self.excluded_outbound_networks),
            outbound_ports: numbers(&self.outbound_ports),
            excluded_outbound_ports: numbers(&self.excluded_outbound_ports),
            excluded_interfaces: texts(&self.excluded_interfaces),
            reroute_virtual_interfaces: texts(&self.virtual_interfaces),
            owner_groups: node.owner_groups.to_wire(),
            excluded_owner_groups: node::group_numbers(&node.excluded_owner_groups),
            dns: self.proxy.dns.then(|| wire::DnsSelection {
                all: true,
                servers: Vec::new(),
            }),
            drop_invalid: self.proxy.drop_invalid,
            loopback_network: node.loopback.to_string(),
        }
    }
}

/// Returns `None` if nothing is selected, `Some(None)` if everything is.
fn listed<T>(selection: &Selection<T>) -> Option<Option<&[T]>> {
    match selection {
        Selection::All => Some(None),
        Selection::These(these) => (!these.is_empty()).then_some(Some(these)),
    }
}

fn described<T: Display>(selection: &Selection<T>) -> String {
    match listed(selection) {
        Some(None) => ALL.to_owned(),
        Some(Some(these)) => joined(these),
        None => "none".to_owned(),
    }
}

type Annotation<'a> = (&'static str, &'a str);

fn list<T>(
    parse: impl Fn(&str) -> Result<T, InvalidList>,
    (annotation, text): Annotation<'_>,
) -> Result<T, Malformed> {
    parse(text).map_err(malformed(annotation))
}

/// Parses `*` as everything, anything else as a list.
fn all_or<T>(
    parse: impl Fn(&str) -> Result<Vec<T>, InvalidList>,
    value: Annotation<'_>,
) -> Result<Selection<T>, Malformed> {
    if value.1 == "*" {
        return Ok(Selection::All);
    }
    list(parse, value).map(Selection::These)
}

fn inbound(mode: Option<&str>) -> Result<InboundCapture, Malformed> {
    match mode {
        None | Some(keys::INTERCEPTION_REDIRECT) => Ok(InboundCapture::Redirect),
        Some(keys::INTERCEPTION_TPROXY) => Ok(InboundCapture::Tproxy),
        Some(other) => {
            let excerpt: String = other.chars().take(64).collect();
            Err(Malformed {
                annotation: keys::INTERCEPTION_MODE,
                why: format!("{excerpt:?} is not a mode; give REDIRECT, TPROXY or NONE"),
            })
        }
    }
}

#[cfg(test)]
mod tests;
