//! How a pod's traffic is to be redirected: what the node says, and what the pod may choose for itself.
//!
//! A pod's annotations choose only what Istio lets it choose. None of it takes its traffic past ztunnel in a way that
//! the namespace's policies would not see (design.md, 6).

use std::{collections::BTreeMap, str::FromStr};

use inpod_proto::netconfig::v1 as wire;
use serde::{Deserialize, Serialize};
use workload::keys;

/// What the node's settings say for every pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// Whether name resolution goes to ztunnel, unless a pod says otherwise.
    pub dns: bool,
    /// Whether IPv6 is captured.
    pub ipv6: Ipv6,
    /// How inbound TCP is captured.
    pub inbound: Inbound,
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

/// How inbound TCP is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// What a pod asks for by its annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wishes {
    /// Whether its name resolution goes to ztunnel; unset: as the node says.
    pub dns_capture: Option<bool>,
    /// Whether its inbound TCP is left alone.
    pub bypass_inbound_capture: bool,
    /// Interfaces whose arriving TCP is taken for outbound. netconfig proves the names.
    pub virtual_interfaces: Vec<String>,
}

impl Wishes {
    /// From a pod's annotations. A truth value that is none is as good as absent, as with Istio.
    pub fn of(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |name| Some(annotations?.get(name)?.as_str());
        let names = text(keys::REROUTE_VIRTUAL_INTERFACES).unwrap_or_default();
        let names = names.split(',').map(str::trim);
        Self {
            dns_capture: text(keys::DNS_CAPTURE).and_then(truth),
            bypass_inbound_capture: text(keys::BYPASS_INBOUND_CAPTURE)
                .and_then(truth)
                .unwrap_or(false),
            virtual_interfaces: names
                .filter(|name| !name.is_empty())
                .map(ToOwned::to_owned)
                .collect(),
        }
    }
}

/// What Go's strconv.ParseBool takes, by which Istio reads its annotations.
fn truth(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// The redirection of a pod that is in the mesh.
pub fn ambient(capture: Capture, wishes: &Wishes) -> wire::Redirection {
    let ipv6 = match capture.ipv6 {
        Ipv6::Auto => wire::Ipv6Capture::Unspecified,
        Ipv6::On => wire::Ipv6Capture::On,
        Ipv6::Off => wire::Ipv6Capture::Off,
    };
    let inbound = match capture.inbound {
        Inbound::Redirect => wire::InboundCapture::Redirect,
        Inbound::Tproxy => wire::InboundCapture::Tproxy,
    };
    let ambient = wire::AmbientRedirection {
        dns_capture: wishes.dns_capture.unwrap_or(capture.dns),
        bypass_inbound_capture: wishes.bypass_inbound_capture,
        reroute_virtual_interfaces: wishes.virtual_interfaces.clone(),
        inbound_capture: inbound.into(),
        ipv6: ipv6.into(),
        exclusions: None,
        keep_existing_connections: false,
    };
    wire::Redirection {
        mode: Some(wire::redirection::Mode::Ambient(ambient)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Capture = Capture {
        dns: true,
        ipv6: Ipv6::Off,
        inbound: Inbound::Redirect,
    };

    fn wishes(annotations: &[(&str, &str)]) -> Wishes {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Wishes::of(Some(&annotations.iter().map(text).collect()))
    }

    fn of(wishes: &Wishes) -> wire::AmbientRedirection {
        let Some(wire::redirection::Mode::Ambient(ambient)) = ambient(NODE, wishes).mode else {
            unreachable!("there is no other mode");
        };
        ambient
    }

    #[test]
    fn the_node_decides_for_a_pod_that_asks_for_nothing() {
        let asked = of(&Wishes::of(None));
        assert!(asked.dns_capture && !asked.bypass_inbound_capture);
        assert_eq!(asked.ipv6(), wire::Ipv6Capture::Off);
    }

    #[test]
    fn a_pod_decides_on_its_name_resolution_in_either_direction() {
        for (text, captured) in [
            ("false", false),
            ("0", false),
            ("true", true),
            ("nonsense", true),
        ] {
            let asked = of(&wishes(&[(keys::DNS_CAPTURE, text)]));
            assert_eq!(asked.dns_capture, captured, "{text}");
        }
    }

    #[test]
    fn ingress_mode_is_asked_for_with_what_go_takes_for_true() {
        for (text, bypassed) in [("true", true), ("T", true), ("yes", false), ("", false)] {
            let asked = of(&wishes(&[(keys::BYPASS_INBOUND_CAPTURE, text)]));
            assert_eq!(asked.bypass_inbound_capture, bypassed, "{text}");
        }
    }

    #[test]
    fn interfaces_are_named_with_commas_between_them() {
        let asked = of(&wishes(&[(
            keys::REROUTE_VIRTUAL_INTERFACES,
            " vm0, ,net1,",
        )]));
        assert_eq!(asked.reroute_virtual_interfaces, ["vm0", "net1"]);
    }
}
