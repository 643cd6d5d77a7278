//! Determines a pod's redirection from the node's settings and the pod's annotations.
//!
//! Pods may choose the same settings as in Istio, including "ingress mode", which leaves inbound traffic alone
//! (decision 40). Inpod's own settings that let traffic bypass ztunnel (exclusions, connections from before the
//! enrollment) need the permission of the node or namespace. Istio's annotations alone configure a sidecar's
//! redirection (decision 53).

mod exclusions;
mod permissions;
mod sidecar;

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{
    Enrollment, keys,
    redirection::{Exclusions, Ipv6},
};
use serde::{Deserialize, Serialize};

pub use exclusions::{Malformed, texts as exclusion_texts};
pub use permissions::{Permission, Permissions};
pub use sidecar::{Group, NodeLoopback, OwnerGroups, Proxy, Sidecar};

/// The node's part of every redirection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    pub dns: bool,
    /// The setting applies to ztunnel and sidecars.
    pub ipv6: Ipv6,
    pub owner_groups: OwnerGroups,
    pub excluded_owner_groups: Vec<Group>,
    /// The pod's own loopback network, which is never captured.
    pub loopback: NodeLoopback,
}

/// A pod's redirection in the form of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection {
    Ambient(RequestedSettings),
    Sidecar(Box<Sidecar>),
}

impl Default for Redirection {
    fn default() -> Self {
        Self::Ambient(RequestedSettings::default())
    }
}

impl Redirection {
    pub fn is_sidecar(&self) -> bool {
        matches!(self, Self::Sidecar(_))
    }

    /// Returns whether the pod's annotation asks for the capture of DNS queries.
    pub fn asks_for_dns(&self) -> bool {
        matches!(self, Self::Ambient(settings) if settings.dns_capture == Some(true))
    }

    pub fn enrollment(&self) -> Enrollment {
        match self {
            Self::Ambient(_) => Enrollment::Ambient,
            Self::Sidecar(_) => Enrollment::Sidecar,
        }
    }

    pub fn to_wire(&self, node: &Capture) -> wire::Redirection {
        let mode = match self {
            Self::Ambient(settings) => wire::redirection::Mode::Ambient(ambient(node, settings)),
            Self::Sidecar(sidecar) => wire::redirection::Mode::Sidecar(sidecar.to_wire(node)),
        };
        wire::Redirection { mode: Some(mode) }
    }
}

/// Requested and permitted settings, on top of the node's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestedSettings {
    pub dns_capture: Option<bool>,
    pub bypass_inbound_capture: bool,
    /// Interfaces whose incoming TCP is treated as outbound. netconfig validates the names.
    pub virtual_interfaces: Vec<String>,
    pub exclusions: Exclusions,
    /// Connections from before the enrollment continue uncaptured.
    pub keep_existing_connections: bool,
    /// TCP ports for the kubelet's probes, or `None` if any port may be probed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_ports: Option<BTreeSet<NonZeroU16>>,
}

/// The settings that a pod requests, permitted or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    settings: RequestedSettings,
    malformed: Option<Malformed>,
}

/// A requested setting that needs a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivilegedRequest {
    pub annotation: &'static str,
    /// The annotation's value, or the reason why the value is malformed.
    pub text: String,
    pub needs: Permission,
}

impl Requested {
    /// Reads the requested settings. An invalid boolean counts as absent, as in Istio.
    pub fn from_annotations(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |name| Some(annotations?.get(name)?.as_str());
        let is_true = |name| text(name).and_then(parse_bool).unwrap_or(false);
        let names = text(keys::REROUTE_VIRTUAL_INTERFACES).unwrap_or_default();
        let names = names.split(',').map(str::trim);
        let exclusions = exclusions::from_annotations(text);
        Self {
            malformed: exclusions.as_ref().err().cloned(),
            settings: RequestedSettings {
                dns_capture: text(keys::DNS_CAPTURE).and_then(parse_bool),
                bypass_inbound_capture: is_true(keys::BYPASS_INBOUND_CAPTURE),
                virtual_interfaces: names
                    .filter(|name| !name.is_empty())
                    .map(ToOwned::to_owned)
                    .collect(),
                exclusions: exclusions.unwrap_or_default(),
                keep_existing_connections: is_true(keys::KEEP_EXISTING_CONNECTIONS),
                probe_ports: None,
            },
        }
    }

    /// Narrows the kubelet's probes to the ports of the pod's manifest.
    pub fn with_probe_ports(mut self, ports: Option<BTreeSet<NonZeroU16>>) -> Self {
        self.settings.probe_ports = ports;
        self
    }

    pub fn privileged(&self) -> impl Iterator<Item = PrivilegedRequest> {
        let malformed = self.malformed.as_ref();
        let malformed = malformed.map(|it| (it.annotation, it.why.clone()));
        let exclusions = exclusions::texts(&self.settings.exclusions).chain(malformed);
        let exclusions = exclusions.map(|(annotation, text)| PrivilegedRequest {
            annotation,
            text,
            needs: Permission::Exclude,
        });
        let keeps = self.settings.keep_existing_connections;
        exclusions.chain(keeps.then(|| PrivilegedRequest {
            annotation: keys::KEEP_EXISTING_CONNECTIONS,
            text: true.to_string(),
            needs: Permission::KeepExisting,
        }))
    }
}

/// Returns the requested settings that need no permission or have the needed permission.
///
/// # Errors
///
/// If a permitted annotation is malformed. Other annotations need not be valid.
pub fn granted(
    requested: &Requested,
    namespace: Permissions,
    node: Permissions,
) -> Result<RequestedSettings, Malformed> {
    let permitted = namespace.or(node);
    let mut settings = requested.settings.clone();
    if !permitted.include(Permission::Exclude) {
        settings.exclusions = Exclusions::default();
    } else if let Some(malformed) = &requested.malformed {
        return Err(malformed.clone());
    }
    settings.keep_existing_connections &= permitted.include(Permission::KeepExisting);
    Ok(settings)
}

/// Parses a boolean like Go's `strconv.ParseBool`, which Istio uses.
pub(crate) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn ambient(node: &Capture, settings: &RequestedSettings) -> wire::AmbientRedirection {
    wire::AmbientRedirection {
        dns_capture: settings.dns_capture.unwrap_or(node.dns),
        bypass_inbound_capture: settings.bypass_inbound_capture,
        reroute_virtual_interfaces: settings.virtual_interfaces.clone(),
        ipv6: wire::Ipv6Capture::from(node.ipv6).into(),
        exclusions: (settings.exclusions != Exclusions::default())
            .then(|| (&settings.exclusions).into()),
        keep_existing_connections: settings.keep_existing_connections,
        probe_ports: settings
            .probe_ports
            .as_ref()
            .map(|ports| wire::PortSelection {
                all: false,
                ports: numbers(ports),
            }),
        ..wire::AmbientRedirection::default()
    }
}

fn malformed<E: ToString>(annotation: &'static str) -> impl Fn(E) -> Malformed {
    move |error| Malformed {
        annotation,
        why: error.to_string(),
    }
}

fn numbers<'a>(ports: impl IntoIterator<Item = &'a NonZeroU16>) -> Vec<u32> {
    ports.into_iter().map(|port| port.get().into()).collect()
}

fn texts<T: ToString>(entries: impl IntoIterator<Item = T>) -> Vec<String> {
    entries.into_iter().map(|entry| entry.to_string()).collect()
}

fn joined<T: ToString>(entries: impl IntoIterator<Item = T>) -> String {
    texts(entries).join(",")
}

#[cfg(test)]
mod tests;
