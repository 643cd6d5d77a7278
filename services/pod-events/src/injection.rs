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
    disable_envoy: Option<Box<str>>,
    proxy: Option<ContainerList>,
    role: Option<Box<str>>,
    inject: Option<Box<str>>,
    interception: Option<Box<str>>,
    sidecar: Result<Sidecar, Malformed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContainerList {
    Containers,
    InitContainers,
}

/// The reason why a pod's traffic is not redirected to its sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// A container sets up the redirection itself.
    OwnInit,
    /// The proxy takes no traffic, as with proxyless gRPC.
    EnvoyDisabled,
    NoProxy,
    /// The proxy is a gateway or waypoint.
    OtherRole,
    /// The pod declares itself without a sidecar.
    OptedOut,
    NoInterception,
}

impl Skip {
    pub fn description(self) -> &'static str {
        match self {
            Self::OwnInit => "its container istio-init sets up the redirection itself",
            Self::EnvoyDisabled => "DISABLE_ENVOY is set: its proxy takes no traffic",
            Self::NoProxy => "it has no container istio-proxy",
            Self::OtherRole => "its proxy does not have the arguments of a sidecar",
            Self::OptedOut => "its label or annotation sidecar.istio.io/inject is false",
            Self::NoInterception => "its annotation sidecar.istio.io/interceptionMode is NONE",
        }
    }
}

/// The combined spec of all containers named `istio-proxy`; later containers override earlier containers, as in Istio.
#[derive(Default)]
struct ProxySpec<'a> {
    list: Option<ContainerList>,
    environment: BTreeMap<&'a str, &'a str>,
    role: Option<&'a str>,
    user: Option<i64>,
    group: Option<i64>,
}

impl<'a> ProxySpec<'a> {
    fn merge(&mut self, list: ContainerList, container: &'a k8s::Container) {
        if container.name != PROXY {
            return;
        }
        self.list = Some(list);
        // A value from elsewhere is known only to the kubelet and counts as empty, as in Istio.
        let variables = container.env.iter().flatten();
        let value =
            |it: &'a k8s::EnvVar| (it.name.as_str(), it.value.as_deref().unwrap_or_default());
        self.environment.extend(variables.map(value));
        if let Some([command, role, ..]) = container.args.as_deref()
            && command == "proxy"
        {
            self.role = Some(role);
        }
        if let Some(context) = &container.security_context {
            (self.user, self.group) = (context.run_as_user, context.run_as_group);
        }
    }

    fn is_true(&self, name: &str) -> bool {
        let text = self.environment.get(name);
        text.and_then(|text| parse_bool(text)).unwrap_or(false)
    }

    fn proxy(&self) -> Proxy {
        Proxy {
            uid: id(self.user),
            gid: id(self.group),
            dns: self.is_true("ISTIO_META_DNS_CAPTURE"),
            drop_invalid: self.is_true("INVALID_DROP"),
        }
    }
}

/// Returns a user or group ID. With an invalid number no container starts, so any ID will do.
fn id(value: Option<i64>) -> u32 {
    let value = value.and_then(|id| u32::try_from(id).ok());
    value.filter(|id| *id != 0).unwrap_or(DEFAULT_PROXY_ID)
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
        let init = spec.init_containers.iter().flatten();
        let mut proxy_spec = ProxySpec::default();
        init.clone()
            .for_each(|it| proxy_spec.merge(ContainerList::InitContainers, it));
        spec.containers
            .iter()
            .for_each(|it| proxy_spec.merge(ContainerList::Containers, it));
        let label = labels.and_then(|labels| labels.get(keys::SIDECAR_INJECT));
        let inject = label
            .map(String::as_str)
            .or_else(|| annotation(keys::SIDECAR_INJECT));
        Some(Self {
            has_init: init.chain(&spec.containers).any(|it| it.name == INIT),
            disable_envoy: proxy_spec
                .environment
                .get("DISABLE_ENVOY")
                .copied()
                .map(truncate),
            proxy: proxy_spec.list,
            role: proxy_spec.role.map(truncate),
            inject: inject.map(truncate),
            interception: annotation(keys::INTERCEPTION_MODE).map(truncate),
            sidecar: Sidecar::from_annotations(proxy_spec.proxy(), annotation),
        })
    }

    /// Returns the first condition that excludes the pod.
    pub fn skip(&self) -> Option<Skip> {
        let is = |text: &Option<Box<str>>, value| text.as_deref() == Some(value);
        let role = self.role.as_deref().filter(|role| !role.is_empty());
        let conditions = [
            (self.has_init, Skip::OwnInit),
            (
                self.disable_envoy.as_deref().and_then(parse_bool) == Some(true),
                Skip::EnvoyDisabled,
            ),
            (self.proxy.is_none(), Skip::NoProxy),
            (role.is_some_and(|role| role != "sidecar"), Skip::OtherRole),
            (is(&self.inject, keys::SIDECAR_INJECT_FALSE), Skip::OptedOut),
            (
                is(&self.interception, keys::INTERCEPTION_NONE),
                Skip::NoInterception,
            ),
        ];
        let mut met = conditions.into_iter().filter(|(is_so, _)| *is_so);
        met.next().map(|(_, skip)| skip)
    }

    pub fn sidecar(&self) -> Result<&Sidecar, &Malformed> {
        self.sidecar.as_ref()
    }

    pub fn inputs(&self) -> Vec<(String, String)> {
        let text = |text: &Option<Box<str>>| text.as_deref().unwrap_or_default().to_owned();
        let list = match self.proxy {
            None => "",
            Some(ContainerList::Containers) => "in containers",
            Some(ContainerList::InitContainers) => "in initContainers",
        };
        let inject = keys::SIDECAR_INJECT;
        let mut inputs = vec![
            (format!("pod container {INIT}"), self.has_init.to_string()),
            (
                format!("{PROXY} variable DISABLE_ENVOY"),
                text(&self.disable_envoy),
            ),
            (format!("pod container {PROXY}"), list.to_owned()),
            (format!("{PROXY} role"), text(&self.role)),
            (
                format!("pod label or annotation {inject}"),
                text(&self.inject),
            ),
            (
                format!("pod annotation {}", keys::INTERCEPTION_MODE),
                text(&self.interception),
            ),
        ];
        let skip = self.skip();
        let why = skip.map_or("none", Skip::description);
        inputs.push((
            "reason for no redirection to the sidecar".to_owned(),
            why.to_owned(),
        ));
        match &self.sidecar {
            Ok(sidecar) if skip.is_none() => inputs.extend(sidecar.describe()),
            Err(Malformed { annotation, why }) if skip.is_none() => {
                inputs.push((
                    format!("pod annotation {annotation}"),
                    format!("malformed: {why}"),
                ));
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
