//! The syntax of labels and taints, and the selector of ztunnel pods.

use std::str::FromStr;

use inpod_types::NamespaceName;
use kube::core::{Expression, SelectorExt};

use crate::pod::Pod;

/// Selects pods of a namespace by a single label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    namespace: NamespaceName,
    label: Expression,
}

impl Selector {
    pub(crate) fn selects(&self, pod: &Pod) -> bool {
        pod.pod.namespace == self.namespace && self.label.matches(&pod.labels)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(namespace, rest)| {
            let (label, value) = rest.split_once('=')?;
            (is_label(label) && is_name(value)).then_some(Self {
                namespace: namespace.parse().ok()?,
                label: Expression::Equal(label.to_owned(), value.to_owned()),
            })
        });
        parsed.ok_or_else(|| {
            format!(
                "setting ztunnel_pods: \"{text}\" is not NAMESPACE/LABEL=VALUE, for example istio-system/app=ztunnel"
            )
        })
    }
}

/// The key of a start-up taint, such as `inpod.io/not-ready`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaintKey(Box<str>);

impl TaintKey {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TaintKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !is_label(text) {
            return Err(format!(
                "setting startup_taints: {text:?} is not the key of a taint, for example inpod.io/not-ready"
            ));
        }
        let prefix = text.split_once('/').map_or("", |(prefix, _)| prefix);
        if prefix == "kubernetes.io" || prefix.ends_with(".kubernetes.io") {
            return Err(format!(
                "setting startup_taints: the taint {text:?} belongs to Kubernetes; choose a key such as inpod.io/not-ready"
            ));
        }
        Ok(Self(text.into()))
    }
}

/// Accepts label keys with or without a prefix.
pub(crate) fn is_label(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_prefix(prefix) && is_name(name),
        None => is_name(text),
    }
}

/// Accepts label names and nonempty label values: at most 63 letters, digits, `-`, `_` and `.`, with a letter or
/// digit at both ends (Kubernetes, "Labels and Selectors").
pub(crate) fn is_name(text: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let mut bytes = text.bytes();
    text.len() <= 63
        && bytes.clone().all(is_inside)
        && is_edge(bytes.clone().next())
        && is_edge(bytes.next_back())
}

/// Accepts a label prefix, which is a DNS subdomain.
fn is_prefix(text: &str) -> bool {
    let is_dns = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_part = |part: &str| is_name(part) && part.bytes().all(is_dns);
    text.len() <= 253 && text.split('.').all(is_part)
}
