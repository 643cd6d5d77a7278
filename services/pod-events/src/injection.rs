//! Detects the traces of a sidecar injector: whether a pod's traffic is redirected to its sidecar, and how.
//!
//! Istio's plugin checks six conditions; inpod adds another condition. The first condition that applies excludes the
//! pod (services/docs/facts/istio-sidecar.md, 3.2).

use std::collections::BTreeMap;

use inpod_types::keys;
use k8s_openapi::api::core::v1 as k8s;

use crate::redirection::{Malformed, Proxy, Sidecar, parse_bool};

const INIT: &str = "istio-init";

const PROXY: &str = "istio-proxy";

/// The default of the proxy's user and group, even for a root user or group (services/docs/facts/istio-sidecar.md,
/// 3.3): with TPROXY the proxy runs as root with this group.
const DEFAULT_PROXY_ID: u32 = 1337;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    has_init: bool,
    disable_envoy: Box<str>,
    /// The list of containers that has the proxy, as a text for operators.
    proxy: Option<&'static str>,
    role: Box<str>,
    inject: Box<str>,
    interception: Box<str>,
    sidecar: Result<Sidecar, Malformed>,
}

/// Returns a user or group ID. With an invalid number no container starts, so any ID will do.
fn id(value: Option<i64>) -> u32 {
    let value = value.and_then(|id| u32::try_from(id).ok());
    value.filter(|id| *id != 0).unwrap_or(DEFAULT_PROXY_ID)
}

/// Returns the variables of a container. A value from elsewhere is known only to the kubelet and counts as empty, as in
/// Istio.
fn variables(container: &k8s::Container) -> impl Iterator<Item = (&str, &str)> {
    let all = container.env.iter().flatten();
    all.map(|it| (it.name.as_str(), it.value.as_deref().unwrap_or_default()))
}

fn role(container: &k8s::Container) -> Option<&str> {
    match container.args.as_deref()? {
        [command, role, ..] if command == "proxy" => Some(role),
        _ => None,
    }
}

impl Injection {
    /// Returns `None` without an injector's status annotation.
    pub fn detect(
        labels: Option<&BTreeMap<String, String>>,
        annotations: Option<&BTreeMap<String, String>>,
        spec: &k8s::PodSpec,
    ) -> Option<Self> {
        let annotation = |name| Some(annotations?.get(name)?.as_str());
        annotation(keys::SIDECAR_STATUS)?;
        let inits = spec.init_containers.iter().flatten();
        let containers = inits
            .map(|it| ("in initContainers", it))
            .chain(spec.containers.iter().map(|it| ("in containers", it)));
        // Of several containers named `istio-proxy`, later containers override earlier containers, as in Istio.
        let mut proxies = containers.clone().filter(|(_, it)| it.name == PROXY);
        let environment: BTreeMap<_, _> =
            proxies.clone().flat_map(|(_, it)| variables(it)).collect();
        let variable = |name| environment.get(name).copied().unwrap_or_default();
        let is_true = |name| parse_bool(variable(name)).unwrap_or(false);
        let mut contexts = proxies
            .clone()
            .filter_map(|(_, it)| it.security_context.as_ref());
        let context = contexts.next_back();
        let proxy = Proxy {
            uid: id(context.and_then(|it| it.run_as_user)),
            gid: id(context.and_then(|it| it.run_as_group)),
            dns: is_true("ISTIO_META_DNS_CAPTURE"),
            drop_invalid: is_true("INVALID_DROP"),
        };
        let role = proxies.clone().filter_map(|(_, it)| role(it)).next_back();
        let label = labels.and_then(|labels| labels.get(keys::SIDECAR_INJECT));
        let inject = label
            .map(String::as_str)
            .or_else(|| annotation(keys::SIDECAR_INJECT));
        Some(Self {
            has_init: containers.clone().any(|(_, it)| it.name == INIT),
            disable_envoy: truncate(variable("DISABLE_ENVOY")),
            proxy: proxies.next_back().map(|(list, _)| list),
            role: truncate(role.unwrap_or_default()),
            inject: truncate(inject.unwrap_or_default()),
            interception: truncate(annotation(keys::INTERCEPTION_MODE).unwrap_or_default()),
            sidecar: Sidecar::from_annotations(proxy, annotation),
        })
    }

    /// Returns why the pod's traffic is not redirected to its sidecar: the first condition that excludes the pod.
    pub fn skip(&self) -> Option<&'static str> {
        if self.has_init {
            Some("its container istio-init sets up the redirection itself")
        } else if parse_bool(&self.disable_envoy) == Some(true) {
            // The proxy takes no traffic, as with proxyless gRPC.
            Some("DISABLE_ENVOY is set: its proxy takes no traffic")
        } else if self.proxy.is_none() {
            Some("it has no container istio-proxy")
        } else if !matches!(&*self.role, "" | "sidecar") {
            // The proxy is a gateway or waypoint.
            Some("its proxy does not have the arguments of a sidecar")
        } else if *self.inject == *keys::SIDECAR_INJECT_FALSE {
            Some("its label or annotation sidecar.istio.io/inject is false")
        } else if *self.interception == *keys::INTERCEPTION_NONE {
            Some("its annotation sidecar.istio.io/interceptionMode is NONE")
        } else {
            None
        }
    }

    pub fn sidecar(&self) -> Result<&Sidecar, &Malformed> {
        self.sidecar.as_ref()
    }

    pub fn inputs(&self) -> Vec<(String, String)> {
        let has_init = self.has_init.to_string();
        let inject = format!("pod label or annotation {}", keys::SIDECAR_INJECT);
        let interception = format!("pod annotation {}", keys::INTERCEPTION_MODE);
        let skip = self.skip();
        let why = skip.unwrap_or("none");
        let inputs: [(&str, &str); 7] = [
            ("pod container istio-init", &has_init),
            ("istio-proxy variable DISABLE_ENVOY", &self.disable_envoy),
            ("pod container istio-proxy", self.proxy.unwrap_or_default()),
            ("istio-proxy role", &self.role),
            (&inject, &self.inject),
            (&interception, &self.interception),
            ("reason for no redirection to the sidecar", why),
        ];
        let mut inputs: Vec<_> = inputs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        match &self.sidecar {
            Ok(sidecar) if skip.is_none() => inputs.extend(sidecar.describe()),
            Err(Malformed { annotation, why }) if skip.is_none() => {
                let name = format!("pod annotation {annotation}");
                inputs.push((name, format!("malformed: {why}")));
            }
            Ok(_) | Err(_) => {}
        }
        inputs
    }
}

/// Truncates a value to bound memory: longer values have no effect anyway.
fn truncate(text: &str) -> Box<str> {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
