//! Compares decisions on random pods with a plain implementation of the reference
//! (services/docs/facts/istio-sidecar.md, 3.2 to 3.4) that shares only annotation names with the code. Quirks of
//! Istio that `services/docs/sidecars.md` lists as corrected are corrected here too, with their number.

mod pods;

use std::{collections::BTreeSet, net::Ipv6Addr};

use inpod_proto::netconfig::v1 as wire;
use k8s_openapi::api::core::v1 as k8s;
use proptest::prelude::*;
use serde_json::Value;

use super::super::*;
use crate::{
    redirection::Redirection,
    testing::{capture, namespace, policy},
};
use pods::pods;

const TRAFFIC: &str = "traffic.sidecar.istio.io/";

#[derive(Debug, PartialEq)]
enum Verdict {
    Out(&'static str),
    Ambient,
    Sidecar(Box<wire::SidecarRedirection>),
    Malformed(String),
}

fn text<'a>(pod: &'a Value, kind: &str, name: &str) -> Option<&'a str> {
    pod["metadata"][kind].get(name)?.as_str()
}

fn containers(pod: &Value) -> Vec<&Value> {
    let mut all = Vec::new();
    for list in ["initContainers", "containers"] {
        all.extend(pod["spec"][list].as_array().into_iter().flatten());
    }
    all
}

fn proxy(pod: &Value) -> Option<&Value> {
    containers(pod)
        .into_iter()
        .find(|it| it["name"] == "istio-proxy")
}

fn is_true(pod: &Value, variable: &str) -> bool {
    let mut value = "";
    for one in proxy(pod).unwrap_or(&Value::Null)["env"]
        .as_array()
        .into_iter()
        .flatten()
    {
        if one["name"] == variable {
            value = one["value"].as_str().unwrap_or("");
        }
    }
    ["1", "t", "T", "TRUE", "true", "True"].contains(&value)
}

/// Implements section 3.2 for an injected pod.
fn is_skipped(pod: &Value) -> bool {
    if containers(pod).iter().any(|it| it["name"] == "istio-init") {
        return true;
    }
    if is_true(pod, "DISABLE_ENVOY") {
        return true;
    }
    let Some(proxy) = proxy(pod) else { return true };
    if proxy["args"][0] == "proxy" {
        let role = proxy["args"][1].as_str().unwrap_or("");
        if !role.is_empty() && role != "sidecar" {
            return true;
        }
    }
    let inject = "sidecar.istio.io/inject";
    let value = text(pod, "labels", inject).or_else(|| text(pod, "annotations", inject));
    // Quirk 10: the injector ignores values like `False`.
    if value == Some("false") {
        return true;
    }
    text(pod, "annotations", "sidecar.istio.io/interceptionMode") == Some("NONE")
}

fn verdict(pod: &Value, is_excluded: bool) -> Verdict {
    if pod["spec"]["hostNetwork"] == true {
        return Verdict::Out("HOST_NETWORK");
    }
    if pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed" {
        return Verdict::Out("POD_TERMINAL");
    }
    if is_excluded {
        return Verdict::Out("NAMESPACE_EXCLUDED");
    }
    if text(pod, "annotations", "sidecar.istio.io/status").is_none() {
        return if text(pod, "labels", "istio.io/dataplane-mode") == Some("ambient") {
            Verdict::Ambient
        } else if text(pod, "labels", "istio.io/dataplane-mode") == Some("none") {
            Verdict::Out("OPTED_OUT")
        } else {
            Verdict::Out("NOT_SELECTED")
        };
    }
    if is_skipped(pod) {
        return Verdict::Out("HAS_SIDECAR");
    }
    match redirection(pod) {
        Ok(redirection) => Verdict::Sidecar(Box::new(redirection)),
        Err(annotation) => Verdict::Malformed(annotation),
    }
}

fn ports(pod: &Value, name: &str, default: &str) -> Result<Vec<u32>, String> {
    let name = format!("{TRAFFIC}{name}");
    let value = text(pod, "annotations", &name).unwrap_or(default).trim();
    let mut ports = BTreeSet::new();
    for entry in value.split(',').filter(|_| !value.is_empty()) {
        let entry = entry.trim();
        let digits = !entry.is_empty() && entry.chars().all(|it| it.is_ascii_digit());
        let number = entry.parse::<u32>().unwrap_or(u32::MAX);
        if !digits || number > 65535 {
            return Err(name);
        }
        ports.insert(number);
    }
    // No connection uses port 0.
    ports.remove(&0);
    if ports.len() > 64 {
        Err(name)
    } else {
        Ok(ports.into_iter().collect())
    }
}

fn octets(address: &str) -> Option<Vec<u8>> {
    if address.contains(':') {
        let address: Ipv6Addr = address.parse().ok()?;
        let is_mapped =
            address.to_string().starts_with("::ffff:") && address.to_string().contains('.');
        return (!is_mapped).then(|| address.octets().to_vec());
    }
    let parts: Vec<_> = address.split('.').collect();
    let octet = |part: &&str| {
        part.parse::<u8>()
            .ok()
            .filter(|it| it.to_string() == **part)
    };
    let octets: Vec<u8> = parts.iter().filter_map(octet).collect();
    (parts.len() == 4 && octets.len() == 4).then_some(octets)
}

fn network(entry: &str) -> Option<String> {
    let (address, length) = entry.split_once('/')?;
    let mut octets = octets(address)?;
    let bits: usize = length
        .parse()
        .ok()
        .filter(|it: &usize| it.to_string() == length)?;
    if bits > octets.len() * 8 {
        return None;
    }
    for bit in bits..octets.len() * 8 {
        octets[bit / 8] &= !(0x80 >> (bit % 8));
    }
    let address = match <[u8; 16]>::try_from(octets.clone()) {
        Ok(v6) => Ipv6Addr::from(v6).to_string(),
        Err(_) => octets
            .iter()
            .map(u8::to_string)
            .collect::<Vec<_>>()
            .join("."),
    };
    Some(format!("{address}/{bits}"))
}

fn networks(pod: &Value, name: &str, default: &str) -> Result<BTreeSet<String>, String> {
    let name = format!("{TRAFFIC}{name}");
    let value = text(pod, "annotations", &name).unwrap_or(default);
    let mut networks = BTreeSet::new();
    for entry in value.split(',').filter(|_| !value.is_empty()) {
        networks.insert(network(entry).ok_or_else(|| name.clone())?);
    }
    if networks.len() > 64 {
        Err(name)
    } else {
        Ok(networks)
    }
}

fn interfaces(pod: &Value, name: &str) -> Result<Vec<String>, String> {
    let value = text(pod, "annotations", name).unwrap_or("").trim();
    let mut names = BTreeSet::new();
    for entry in value.split(',').filter(|_| !value.is_empty()) {
        let entry = entry.trim();
        let letters = ('a'..='z').chain('A'..='Z').collect::<String>();
        let others = letters.clone() + "0123456789_.-";
        let fits = entry.len() <= 15
            && entry
                .chars()
                .next()
                .is_some_and(|first| letters.contains(first))
            && entry.chars().all(|one| others.contains(one));
        if !fits {
            return Err(name.to_owned());
        }
        names.insert(entry.to_owned());
    }
    if names.len() > 16 {
        Err(name.to_owned())
    } else {
        Ok(names.into_iter().collect())
    }
}

fn id(pod: &Value, name: &str) -> u32 {
    let value = proxy(pod).unwrap_or(&Value::Null)["securityContext"][name].as_u64();
    match value {
        None | Some(0) => 1337,
        Some(id) => u32::try_from(id).unwrap_or(1337),
    }
}

fn virtual_interfaces(pod: &Value) -> Result<Vec<String>, String> {
    let newer = "istio.io/reroute-virtual-interfaces";
    match text(pod, "annotations", newer) {
        Some(_) => interfaces(pod, newer),
        None => interfaces(pod, &format!("{TRAFFIC}kubevirtInterfaces")),
    }
}

/// Implements section 3.4 row by row.
fn redirection(pod: &Value) -> Result<wire::SidecarRedirection, String> {
    let value = |name: &str| text(pod, "annotations", &format!("{TRAFFIC}{name}"));
    let mode = "sidecar.istio.io/interceptionMode";
    let inbound_capture = match text(pod, "annotations", mode) {
        None | Some("REDIRECT") => wire::InboundCapture::Redirect,
        Some("TPROXY") => wire::InboundCapture::Tproxy,
        Some(_) => return Err(mode.to_owned()),
    };
    let all_networks = value("includeOutboundIPRanges").is_none_or(|it| it == "*");
    let included = match all_networks {
        true => BTreeSet::new(),
        false => networks(pod, "includeOutboundIPRanges", "")?,
    };
    let excluded = networks(pod, "excludeOutboundIPRanges", "")?;
    // Quirk 12: `*` is not a list.
    let mut not_inbound = ports(pod, "excludeInboundPorts", "15020")?;
    not_inbound.extend([15020, 15021, 15090]);
    let not_inbound: BTreeSet<u32> = not_inbound.into_iter().collect();
    if not_inbound.len() > 64 {
        return Err(format!("{TRAFFIC}excludeInboundPorts"));
    }
    let all_ports = value("includeInboundPorts").is_none_or(|it| it == "*");
    let inbound = if all_ports {
        Vec::new()
    } else {
        ports(pod, "includeInboundPorts", "")?
    };
    let not_outbound = ports(pod, "excludeOutboundPorts", "15020")?;
    let outbound = ports(pod, "includeOutboundPorts", "")?;
    let excluded_interfaces = interfaces(pod, &format!("{TRAFFIC}excludeInterfaces"))?;
    let virtual_interfaces = virtual_interfaces(pod)?;
    Ok(wire::SidecarRedirection {
        inbound_capture: inbound_capture.into(),
        proxy_uids: vec![id(pod, "runAsUser")],
        proxy_gids: vec![id(pod, "runAsGroup")],
        inbound_ports: (all_ports || !inbound.is_empty()).then_some(wire::PortSelection {
            all: all_ports,
            ports: inbound,
        }),
        excluded_inbound_ports: not_inbound.into_iter().collect(),
        outbound_networks: (all_networks || !included.is_empty()).then_some(
            wire::NetworkSelection {
                all: all_networks,
                networks: included.into_iter().collect(),
            },
        ),
        excluded_outbound_networks: excluded.into_iter().collect(),
        outbound_ports: outbound,
        excluded_outbound_ports: not_outbound,
        excluded_interfaces,
        reroute_virtual_interfaces: virtual_interfaces,
        dns: is_true(pod, "ISTIO_META_DNS_CAPTURE").then_some(wire::DnsSelection {
            all: true,
            servers: Vec::new(),
        }),
        drop_invalid: is_true(pod, "INVALID_DROP"),
        loopback_network: "127.0.0.1/32".to_owned(),
        ..wire::SidecarRedirection::default()
    })
}

/// Returns the code's decision, with networks sorted like the oracle's, because their order has no meaning.
fn decided(pod: &Value, is_excluded: bool) -> Verdict {
    let pod: k8s::Pod = serde_json::from_value(pod.clone()).unwrap();
    let pod = Pod::try_from(pod).unwrap();
    let excluded = [if is_excluded { "shop" } else { "kube-system" }
        .parse()
        .unwrap()];
    let selectors = keys::ISTIO_SELECTORS.parse().unwrap();
    let policy = Policy {
        excluded: &excluded,
        ..policy(&selectors)
    };
    let decision = decide(&pod, &namespace("shop"), true, &policy);
    match decision.enrollment {
        Enrollment::Ambient => Verdict::Ambient,
        Enrollment::None | Enrollment::Unknown => Verdict::Out(decision.reason.name()),
        Enrollment::Sidecar => match pod.injection.unwrap().sidecar() {
            Ok(sidecar) => Verdict::Sidecar(Box::new(sorted(sidecar.clone()))),
            Err(malformed) => Verdict::Malformed(malformed.annotation.to_owned()),
        },
    }
}

fn sorted(sidecar: crate::redirection::Sidecar) -> wire::SidecarRedirection {
    let redirection = Redirection::Sidecar(Box::new(sidecar)).to_wire(&capture());
    let Some(wire::redirection::Mode::Sidecar(mut redirection)) = redirection.mode else {
        unreachable!("it is to a sidecar");
    };
    redirection.excluded_outbound_networks.sort();
    if let Some(networks) = &mut redirection.outbound_networks {
        networks.networks.sort();
    }
    redirection
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_pods_are_decided_and_redirected_as_the_reference_says(
        pod in pods(),
        is_excluded in proptest::bool::weighted(0.05),
    ) {
        prop_assert_eq!(decided(&pod, is_excluded), verdict(&pod, is_excluded), "{}", pod);
    }
}

#[test]
fn random_pods_are_of_every_kind() {
    use proptest::{strategy::ValueTree as _, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let mut counts = [0; 4];
    for _ in 0..2_000 {
        let pod = pods().new_tree(&mut runner).unwrap().current();
        counts[match verdict(&pod, false) {
            Verdict::Out(_) => 0,
            Verdict::Ambient => 1,
            Verdict::Sidecar(_) => 2,
            Verdict::Malformed(_) => 3,
        }] += 1;
    }
    assert!(counts.iter().all(|count| *count >= 20), "{counts:?}");
}
