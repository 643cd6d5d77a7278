//! How a pod's traffic is to be redirected: what the node says, and what the pod may choose for itself.
//!
//! What a pod's annotations choose by themselves is what Istio lets them choose, "ingress mode" among it, which leaves
//! inbound traffic alone (DECISIONS 40). What is ours alone and takes traffic past ztunnel, exclusions and connections
//! from before the enrolment, is granted by the node or the namespace, or left out (design.md, 6).

mod exclusions;
mod permissions;

use std::{collections::BTreeMap, str::FromStr};

use inpod_proto::netconfig::v1 as wire;
use serde::{Deserialize, Serialize};
use workload::keys;

pub use exclusions::{Exclusions, Malformed, Network};
pub use permissions::{Permission, Permissions};

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

/// How a pod's redirection differs from what the node says: what it asked for, as far as that is granted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wishes {
    /// Whether its name resolution goes to ztunnel; unset: as the node says.
    pub dns_capture: Option<bool>,
    /// Whether its inbound TCP is left alone.
    pub bypass_inbound_capture: bool,
    /// Interfaces whose arriving TCP is taken for outbound. netconfig proves the names.
    pub virtual_interfaces: Vec<String>,
    /// What is left alone.
    pub exclusions: Exclusions,
    /// Whether connections from before the enrolment go on as they are.
    pub keep_existing_connections: bool,
}

/// What a pod asks for by its annotations, granted or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    wishes: Wishes,
    malformed: Option<Malformed>,
}

/// One thing that a pod asks for and that needs a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The annotation.
    pub annotation: &'static str,
    /// What it says, or what is wrong with that.
    pub text: String,
    /// What it needs.
    pub needs: Permission,
}

impl Asks {
    /// From a pod's annotations. A truth value that is none is as good as absent, as with Istio.
    pub fn of(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |name| Some(annotations?.get(name)?.as_str());
        let is_true = |name| text(name).and_then(truth).unwrap_or(false);
        let names = text(keys::REROUTE_VIRTUAL_INTERFACES).unwrap_or_default();
        let names = names.split(',').map(str::trim);
        let exclusions = Exclusions::of(text);
        Self {
            malformed: exclusions.as_ref().err().cloned(),
            wishes: Wishes {
                dns_capture: text(keys::DNS_CAPTURE).and_then(truth),
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
    pub fn asked(&self) -> impl Iterator<Item = Asked> {
        let malformed = self.malformed.as_ref();
        let malformed = malformed.map(|it| (it.annotation, it.why.clone()));
        let exclusions = self.wishes.exclusions.texts().chain(malformed);
        let exclusions = exclusions.map(|(annotation, text)| Asked {
            annotation,
            text,
            needs: Permission::Exclude,
        });
        let keeps = self.wishes.keep_existing_connections;
        exclusions.chain(keeps.then(|| Asked {
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
    asks: &Asks,
    namespace: Permissions,
    node: Permissions,
) -> Result<Wishes, Malformed> {
    let permitted = namespace.or(node);
    let mut wishes = asks.wishes.clone();
    if !permitted.include(Permission::Exclude) {
        wishes.exclusions = Exclusions::default();
    } else if let Some(malformed) = &asks.malformed {
        return Err(malformed.clone());
    }
    wishes.keep_existing_connections &= permitted.include(Permission::KeepExisting);
    Ok(wishes)
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
        exclusions: (wishes.exclusions != Exclusions::default())
            .then(|| (&wishes.exclusions).into()),
        keep_existing_connections: wishes.keep_existing_connections,
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

    fn asks(annotations: &[(&str, &str)]) -> Asks {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Asks::of(Some(&annotations.iter().map(text).collect()))
    }

    fn permit(words: &str) -> Permissions {
        Permissions::of(words)
    }

    fn wishes(annotations: &[(&str, &str)]) -> Wishes {
        granted(&asks(annotations), permit(""), permit("")).unwrap()
    }

    fn of(wishes: &Wishes) -> wire::AmbientRedirection {
        let Some(wire::redirection::Mode::Ambient(ambient)) = ambient(NODE, wishes).mode else {
            unreachable!("there is no other mode");
        };
        ambient
    }

    #[test]
    fn the_node_decides_for_a_pod_that_asks_for_nothing() {
        let asked = of(&wishes(&[]));
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

    const LEFT_ALONE: (&str, &str) = (keys::EXCLUDE_OUTBOUND_PORTS, "5432");
    const KEPT: (&str, &str) = (keys::KEEP_EXISTING_CONNECTIONS, "true");

    #[test]
    fn what_needs_a_permission_is_granted_by_the_namespace_or_the_node_or_left_out() {
        let asks = asks(&[LEFT_ALONE, KEPT, (keys::DNS_CAPTURE, "false")]);
        for (namespace, node, excludes, keeps) in [
            ("", "", false, false),
            ("exclude", "", true, false),
            ("", "exclude", true, false),
            ("keep-existing", "", false, true),
            ("exclude", "keep-existing", true, true),
        ] {
            let granted = granted(&asks, permit(namespace), permit(node)).unwrap();
            let asked = of(&granted);
            let ports = asked.exclusions.map(|it| it.outbound_ports);
            assert_eq!(ports, excludes.then(|| vec![5432]), "{namespace} {node}");
            assert_eq!(asked.keep_existing_connections, keeps, "{namespace} {node}");
            // Nobody has to permit this.
            assert!(!asked.dns_capture);
        }
    }

    #[test]
    fn what_cannot_be_understood_is_refused_where_it_is_permitted_and_left_out_where_not() {
        let asks = asks(&[LEFT_ALONE, (keys::EXCLUDE_INBOUND_CIDRS, "everywhere")]);
        let error = granted(&asks, permit("exclude"), permit("")).unwrap_err();
        assert_eq!(error.annotation, keys::EXCLUDE_INBOUND_CIDRS);
        let left_out = granted(&asks, permit("keep-existing"), permit("")).unwrap();
        assert_eq!(left_out, Wishes::default());
    }

    #[test]
    fn everything_that_needs_a_permission_is_told_by_the_annotations_name() {
        let told = |annotations: &[(&str, &str)]| {
            let asks = asks(annotations);
            let names = asks.asked().map(|asked| (asked.annotation, asked.needs));
            names.collect::<Vec<_>>()
        };
        assert_eq!(
            told(&[LEFT_ALONE, KEPT]),
            [
                (keys::EXCLUDE_OUTBOUND_PORTS, Permission::Exclude),
                (keys::KEEP_EXISTING_CONNECTIONS, Permission::KeepExisting)
            ]
        );
        let bad = (keys::EXCLUDE_INBOUND_PORTS, "http");
        assert_eq!(told(&[bad]), [(bad.0, Permission::Exclude)]);
        let nothing = [
            (keys::EXCLUDE_INBOUND_PORTS, " , "),
            (keys::KEEP_EXISTING_CONNECTIONS, "yes"),
            (keys::BYPASS_INBOUND_CAPTURE, "true"),
        ];
        assert_eq!(told(&nothing), []);
    }

    #[test]
    fn what_an_earlier_release_wrote_down_is_read() {
        let text = r#"{"dns_capture": true, "bypass_inbound_capture": false, "virtual_interfaces": ["vm0"]}"#;
        let read: Wishes = serde_json::from_str(text).unwrap();
        assert_eq!(read.exclusions, Exclusions::default());
        assert_eq!(read.virtual_interfaces, ["vm0"]);
    }
}
