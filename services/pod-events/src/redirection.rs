//! How a pod's traffic is to be redirected: what the node says, and what the pod may choose for itself.
//!
//! What a pod's annotations choose by themselves is what Istio lets them choose, "ingress mode" among it, which leaves
//! inbound traffic alone (DECISIONS 40). What is ours alone and takes traffic past ztunnel, exclusions and connections
//! from before the enrollment, is granted by the node or the namespace, or left out (design.md, 6). A pod with a proxy of
//! its own has that by Istio's annotations alone (DECISIONS 53).

mod exclusions;
mod permissions;
mod sidecar;

use std::{collections::BTreeMap, str::FromStr};

use inpod_proto::netconfig::v1 as wire;
use inpod_types::{Enrollment, keys};
use serde::{Deserialize, Serialize};

pub use exclusions::{Exclusions, Malformed, Network};
pub use permissions::{Permission, Permissions};
pub use sidecar::{Group, Loopback, OwnerGroups, Proxy, Selection, Sidecar, Sidecars};

/// What the node's settings say for every pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Whether name resolution goes to ztunnel, unless a pod says otherwise.
    pub dns: bool,
    /// Whether IPv6 is captured, to ztunnel or a sidecar.
    pub ipv6: Ipv6,
    /// How inbound TCP is captured to ztunnel.
    pub inbound: Inbound,
    /// What is captured of pods with a sidecar.
    pub sidecars: Sidecars,
}

/// How a pod's traffic is redirected, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// To the node's ztunnel.
    Ambient(RequestedSettings),
    /// To the proxy in the pod.
    Sidecar(Box<Sidecar>),
}

impl Default for Redirection {
    /// To ztunnel, as the node says.
    fn default() -> Self {
        Self::Ambient(RequestedSettings::default())
    }
}

impl Redirection {
    /// Whether it is to the proxy in the pod.
    pub fn is_sidecar(&self) -> bool {
        matches!(self, Self::Sidecar(_))
    }

    /// What a pod is that is redirected so.
    pub fn enrollment(&self) -> Enrollment {
        match self {
            Self::Ambient(_) => Enrollment::Ambient,
            Self::Sidecar(_) => Enrollment::Sidecar,
        }
    }

    /// What was granted of what the pod asks of ztunnel's.
    pub fn settings(&self) -> Option<&RequestedSettings> {
        match self {
            Self::Ambient(settings) => Some(settings),
            Self::Sidecar(_) => None,
        }
    }

    /// The whole redirection, on a node with these settings.
    pub fn to_wire(&self, node: &Capture) -> wire::Redirection {
        let mode = match self {
            Self::Ambient(settings) => wire::redirection::Mode::Ambient(ambient(node, settings)),
            Self::Sidecar(sidecar) => wire::redirection::Mode::Sidecar(sidecar.to_wire(node)),
        };
        wire::Redirection { mode: Some(mode) }
    }
}

/// Whether IPv6 is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6 {
    /// As each pod's netns is.
    Auto,
    /// It is; a pod without it is refused.
    On,
    /// It is left alone.
    Off,
}

impl FromStr for Ipv6 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(format!("\"{text}\" is not auto, on or off")),
        }
    }
}

impl From<Ipv6> for wire::Ipv6Capture {
    fn from(ipv6: Ipv6) -> Self {
        match ipv6 {
            Ipv6::Auto => Self::Unspecified,
            Ipv6::On => Self::On,
            Ipv6::Off => Self::Off,
        }
    }
}

/// How inbound TCP is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Inbound {
    /// By destination NAT.
    Redirect,
    /// By TPROXY.
    Tproxy,
}

impl FromStr for Inbound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "redirect" => Ok(Self::Redirect),
            "tproxy" => Ok(Self::Tproxy),
            _ => Err(format!("\"{text}\" is not redirect or tproxy")),
        }
    }
}

impl From<Inbound> for wire::InboundCapture {
    fn from(inbound: Inbound) -> Self {
        match inbound {
            Inbound::Redirect => Self::Redirect,
            Inbound::Tproxy => Self::Tproxy,
        }
    }
}

/// How a pod's redirection differs from what the node says: what it asked for, as far as that is granted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestedSettings {
    /// Whether its name resolution goes to ztunnel; unset: as the node says.
    pub dns_capture: Option<bool>,
    /// Whether its inbound TCP is left alone.
    pub bypass_inbound_capture: bool,
    /// Interfaces whose arriving TCP is taken for outbound. netconfig proves the names.
    pub virtual_interfaces: Vec<String>,
    /// What is left alone.
    pub exclusions: Exclusions,
    /// Whether connections from before the enrollment go on as they are.
    pub keep_existing_connections: bool,
}

/// What a pod asks for by its annotations, granted or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    settings: RequestedSettings,
    malformed: Option<Malformed>,
}

/// One thing that a pod asks for and that needs a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivilegedRequest {
    /// The annotation.
    pub annotation: &'static str,
    /// What it says, or what is wrong with that.
    pub text: String,
    /// What it needs.
    pub needs: Permission,
}

impl Requested {
    /// From a pod's annotations. A truth value that is none is as good as absent, as with Istio.
    pub fn from_annotations(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |name| Some(annotations?.get(name)?.as_str());
        let is_true = |name| text(name).and_then(parse_bool).unwrap_or(false);
        let names = text(keys::REROUTE_VIRTUAL_INTERFACES).unwrap_or_default();
        let names = names.split(',').map(str::trim);
        let exclusions = Exclusions::from_annotations(text);
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
            },
        }
    }

    /// Everything that needs a permission.
    pub fn privileged(&self) -> impl Iterator<Item = PrivilegedRequest> {
        let malformed = self.malformed.as_ref();
        let malformed = malformed.map(|it| (it.annotation, it.why.clone()));
        let exclusions = self.settings.exclusions.texts().chain(malformed);
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

/// What a pod gets of what it asks for: everything that needs no permission, and what its namespace or the node permits.
///
/// # Errors
///
/// When what is permitted cannot be understood. What is not permitted need not be.
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

/// What Go's strconv.ParseBool takes, by which Istio reads its annotations.
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
        inbound_capture: wire::InboundCapture::from(node.inbound).into(),
        ipv6: wire::Ipv6Capture::from(node.ipv6).into(),
        exclusions: (settings.exclusions != Exclusions::default())
            .then(|| (&settings.exclusions).into()),
        keep_existing_connections: settings.keep_existing_connections,
    }
}

#[cfg(test)]
mod tests;
