//! Decides whether a pod is injected, by the rules of Istio's webhook in their order
//! (services/docs/facts/istio-sidecar.md, 6.3). The webhook's registration has matched the namespace labels before.

use inpod_types::keys;
use serde_json::Value;

use crate::{
    config::{Config, Policy},
    json::{annotation, label},
    selector::Selector,
};

pub const SYSTEM_NAMESPACES: [&str; 4] = [
    "kube-system",
    "kube-public",
    "kube-node-lease",
    "local-path-storage",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Inject,
    Skip(SkipReason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    HostNetwork,
    /// The namespace of the pod is in [`SYSTEM_NAMESPACES`].
    SystemNamespace,
    /// The pod opts out by a label or an annotation.
    OptedOut,
    /// A selector in `neverInjectSelector` matches the pod.
    NeverSelected,
    /// No label, annotation or selector applies, and the policy is `disabled`.
    Policy,
}

impl SkipReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HostNetwork => "host-network",
            Self::SystemNamespace => "system-namespace",
            Self::OptedOut => "opted-out",
            Self::NeverSelected => "never-selected",
            Self::Policy => "policy",
        }
    }
}

/// Decides by the pod alone, and skips a pod that is no JSON object.
pub fn decide(config: &Config, pod: &Value, namespace: &str) -> Decision {
    if pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true)) {
        return Decision::Skip(SkipReason::HostNetwork);
    }
    let own = pod.pointer("/metadata/namespace").and_then(Value::as_str);
    let namespace = own.filter(|own| !own.is_empty()).unwrap_or(namespace);
    if SYSTEM_NAMESPACES.contains(&namespace) {
        return Decision::Skip(SkipReason::SystemNamespace);
    }
    let requested =
        label(pod, keys::SIDECAR_INJECT).or_else(|| annotation(pod, keys::SIDECAR_INJECT));
    match requested {
        Some("true") => return Decision::Inject,
        Some("false") => return Decision::Skip(SkipReason::OptedOut),
        // Other values count as absent, as with Istio, so that a typo changes nothing.
        Some(_) | None => {}
    }
    by_default(config, pod)
}

fn by_default(config: &Config, pod: &Value) -> Decision {
    let any = |selectors: &[Selector]| selectors.iter().any(|it| it.selects(pod));
    if any(&config.never_inject_selector) {
        return Decision::Skip(SkipReason::NeverSelected);
    }
    if any(&config.always_inject_selector) || config.policy == Policy::Enabled {
        return Decision::Inject;
    }
    Decision::Skip(SkipReason::Policy)
}

#[cfg(test)]
mod tests;
