//! Parses `CNI_ARGS` (CNI spec, "Parameters"). By convention, the kubelet's runtimes pass the pod in `K8S_*` keys, in
//! random order.

use std::{collections::BTreeMap, fmt, str::FromStr};

use inpod_types::{NamespaceName, PodName, PodUid};
use serde::{Deserialize, Serialize};

use crate::error::CniError;

const VARIABLE: &str = "CNI_ARGS";
const NAMESPACE: &str = "K8S_POD_NAMESPACE";
const NAME: &str = "K8S_POD_NAME";
const UID: &str = "K8S_POD_UID";
/// Accepted but unused, because the value repeats `CNI_CONTAINERID`.
const INFRA_CONTAINER: &str = "K8S_POD_INFRA_CONTAINER_ID";
const IGNORE_UNKNOWN: &str = "IgnoreUnknown";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedPod {
    pub namespace: NamespaceName,
    pub name: PodName,
    /// The UID of the pod, not sent by some runtimes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<PodUid>,
}

impl NamedPod {
    /// Returns `None` if the call names no namespace or no pod, and so is not for a Kubernetes pod.
    ///
    /// podman sends the container's name as the pod name, without a namespace. With a `default` namespace, the
    /// container counts as a pod if its name is a valid pod name.
    ///
    /// # Errors
    ///
    /// Fails with code 4, naming the pair, if a pair has no `=`, appears twice or is invalid, or if the key is unknown
    /// and `IgnoreUnknown` is not true.
    pub fn from_args(
        text: &str,
        default: Option<&NamespaceName>,
    ) -> Result<Option<Self>, CniError> {
        let pairs = parse_pairs(text)?;
        reject_unknown_keys(&pairs)?;
        let name = match parse_value(&pairs, NAMESPACE)? {
            Some(namespace) => parse_value(&pairs, NAME)?.map(|name| (namespace, name)),
            // podman's names such as "festive_hopper" are not valid pod names, so no error is reported.
            None => default
                .cloned()
                .zip(parse_value(&pairs, NAME).ok().flatten()),
        };
        let uid = parse_value(&pairs, UID)?;
        Ok(name.map(|(namespace, name)| Self {
            namespace,
            name,
            uid,
        }))
    }
}

impl fmt::Display for NamedPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

fn parse_pairs(text: &str) -> Result<BTreeMap<&str, &str>, CniError> {
    let mut pairs = BTreeMap::new();
    for pair in text.split(';').filter(|_| !text.is_empty()) {
        let split = pair.split_once('=').filter(|(key, _)| !key.is_empty());
        let (key, value) = split.ok_or_else(|| invalid(pair, "is not KEY=VALUE"))?;
        if pairs.insert(key, value).is_some() {
            return Err(invalid(key, "is given twice"));
        }
    }
    Ok(pairs)
}

fn reject_unknown_keys(pairs: &BTreeMap<&str, &str>) -> Result<(), CniError> {
    if ignores_unknown(pairs)? {
        return Ok(());
    }
    let known = [NAMESPACE, NAME, UID, INFRA_CONTAINER, IGNORE_UNKNOWN];
    match pairs.keys().find(|key| !known.contains(key)) {
        Some(key) => Err(invalid(key, "is unknown, and IgnoreUnknown is not set")),
        None => Ok(()),
    }
}

fn ignores_unknown(pairs: &BTreeMap<&str, &str>) -> Result<bool, CniError> {
    let value = pairs.get(IGNORE_UNKNOWN).copied().unwrap_or("0");
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(invalid(IGNORE_UNKNOWN, "is not 1, true, 0 or false")),
    }
}

/// Parses the value of a key, and treats an empty value as absent.
fn parse_value<T>(pairs: &BTreeMap<&str, &str>, key: &str) -> Result<Option<T>, CniError>
where
    T: FromStr<Err: fmt::Display>,
{
    let text = pairs.get(key).filter(|text| !text.is_empty());
    let parsed = text.map(|text| text.parse()).transpose();
    parsed.map_err(|error| CniError::in_variable(VARIABLE, format_args!("{key}: {error}")))
}

fn invalid(what: &str, problem: &str) -> CniError {
    let excerpt: String = what.chars().take(80).collect();
    CniError::in_variable(VARIABLE, format_args!("{excerpt:?} {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn pod(text: &str) -> NamedPod {
        NamedPod::from_args(text, None).unwrap().unwrap()
    }

    #[test]
    fn containerds_pairs_are_read_in_any_order() {
        let mut pairs = [
            "IgnoreUnknown=1",
            "K8S_POD_NAMESPACE=shop",
            "K8S_POD_NAME=web-0",
            "K8S_POD_INFRA_CONTAINER_ID=ed27",
            "K8S_POD_UID=1111-22",
        ];
        for _ in 0..pairs.len() {
            pairs.rotate_left(1);
            let pod = pod(&pairs.join(";"));
            assert_eq!(pod.to_string(), "shop/web-0");
            assert_eq!(pod.uid.unwrap().as_str(), "1111-22");
        }
    }

    #[test]
    fn a_call_without_namespace_or_name_is_not_for_a_pod() {
        for text in [
            "",
            "IgnoreUnknown=1;K8S_POD_NAME=c1",
            "IgnoreUnknown=1;K8S_POD_NAME=festive_hopper",
            "K8S_POD_NAMESPACE=shop",
            "K8S_POD_NAMESPACE=;K8S_POD_NAME=web-0",
        ] {
            assert_eq!(NamedPod::from_args(text, None), Ok(None), "{text}");
        }
    }

    #[test]
    fn a_call_without_namespace_is_for_a_pod_of_the_default_namespace_where_there_is_one() {
        let default = "edge".parse().unwrap();
        let named = |text| {
            let pod = NamedPod::from_args(text, Some(&default)).unwrap();
            pod.map(|pod| pod.to_string())
        };
        assert_eq!(
            named("IgnoreUnknown=1;K8S_POD_NAME=c1").as_deref(),
            Some("edge/c1")
        );
        assert_eq!(
            named("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=c1").as_deref(),
            Some("shop/c1")
        );
        assert_eq!(named("IgnoreUnknown=1;K8S_POD_NAME=festive_hopper"), None);
        assert_eq!(named(""), None);
    }

    #[test]
    fn an_empty_uid_is_no_uid() {
        assert_eq!(
            pod("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=").uid,
            None
        );
    }

    #[test]
    fn unknown_keys_pass_only_where_they_are_to_be_ignored() {
        for value in ["1", "true", "TRUE"] {
            let text = format!("IgnoreUnknown={value};MAC=0a:00");
            assert_eq!(NamedPod::from_args(&text, None), Ok(None));
        }
        for text in [
            "MAC=0a:00",
            "IgnoreUnknown=0;MAC=0a:00",
            "IgnoreUnknown=false;MAC=x",
        ] {
            let error = NamedPod::from_args(text, None).unwrap_err();
            assert!(error.msg.contains("MAC"), "{error}");
        }
    }

    #[test]
    fn malformed_pairs_are_error_4_and_named() {
        for (text, named) in [
            ("K8S_POD_NAME", "K8S_POD_NAME"),
            ("=x", "=x"),
            ("IgnoreUnknown=1;", "is not KEY=VALUE"),
            ("IgnoreUnknown=maybe", "IgnoreUnknown"),
            ("K8S_POD_NAME=a;K8S_POD_NAME=b", "twice"),
            (
                "K8S_POD_NAMESPACE=../etc;K8S_POD_NAME=a",
                "K8S_POD_NAMESPACE",
            ),
            ("K8S_POD_NAMESPACE=a;K8S_POD_NAME=A_B", "K8S_POD_NAME"),
            ("K8S_POD_UID=a b", "K8S_POD_UID"),
        ] {
            let error = NamedPod::from_args(text, None).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidEnvironment, "{text}");
            assert!(error.msg.starts_with("CNI_ARGS: "), "{error}");
            assert!(error.msg.contains(named), "{error}");
        }
    }
}
