//! Whether a pod is injected: Istio's selection policy, in its order (services/docs/facts/istio-sidecar.md, 6.3). Labels of namespaces
//! are asked by the API server's selectors, before the webhook is.

use inpod_types::keys;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    config::Config,
    json::{annotation, label},
};

/// Namespaces whose pods are never injected.
pub const SYSTEM_NAMESPACES: [&str; 4] = [
    "kube-system",
    "kube-public",
    "kube-node-lease",
    "local-path-storage",
];

/// What becomes of pods that say nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// They are injected.
    #[default]
    Enabled,
    /// They are not.
    Disabled,
}

/// Whether a pod is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is.
    Inject,
    /// It is not.
    Skip(SkipReason),
}

/// Why a pod is not injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// It shares the node's network.
    HostNetwork,
    /// Its namespace is one of [`SYSTEM_NAMESPACES`].
    SystemNamespace,
    /// Its label or annotation says so.
    OptedOut,
    /// `neverInjectSelector` selects it.
    NeverSelected,
    /// It says nothing, and the policy is `disabled`.
    Policy,
}

impl SkipReason {
    /// In a word, as metrics have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HostNetwork => "host-network",
            Self::SystemNamespace => "system-namespace",
            Self::OptedOut => "opted-out",
            Self::NeverSelected => "never-selected",
            Self::Policy => "policy",
        }
    }

    /// In words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::HostNetwork => "it shares the node's network",
            Self::SystemNamespace => "its namespace is one of the system's",
            Self::OptedOut => "its label or annotation sidecar.istio.io/inject says so",
            Self::NeverSelected => "neverInjectSelector selects it",
            Self::Policy => "it asks for nothing, and the policy is disabled",
        }
    }
}

/// Decides, by what stands in the pod alone. A pod that is no object asks for nothing.
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
        // Anything else says nothing, as with Istio: a typing error turns nothing on or off.
        Some(_) | None => {}
    }
    by_default(config, pod)
}

fn by_default(config: &Config, pod: &Value) -> Decision {
    let any = |selectors: &[crate::selector::Selector]| {
        let mut real = selectors.iter().filter(|selector| !selector.is_empty());
        real.any(|selector| selector.selects(pod))
    };
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
