//! Adds the node's plugin to the networks of a pod, if the plugin is a Multus network instead of a part of the CNI
//! chain (services/docs/facts/istio-sidecar.md, 6.6).

use inpod_types::keys;
use serde_json::{Value, json};

use super::Pairs;
use crate::{config::Config, error::InjectError, json};

/// Appends the configured network in the form that the pod's list has, unless the list contains the network.
pub(super) fn of_networks(config: &Config, pod: &Value) -> Result<Pairs<1>, InjectError> {
    let annotation = json::annotation(pod, keys::MULTUS_NETWORKS).unwrap_or_default();
    let network = config.multus_network.as_str();
    let list = if network.is_empty() {
        Value::Null
    } else if annotation.trim().is_empty() {
        network.into()
    } else if annotation.trim_start().starts_with('[') {
        objects(annotation, network)?.into()
    } else {
        names(annotation, network).into()
    };
    Ok([("pod.networks", list)])
}

/// Appends to a comma-separated list of `NAMESPACE/NAME@INTERFACE`, in which only the name is required.
fn names(annotation: &str, network: &str) -> String {
    let mut names = annotation.split(',').map(|name| name.split('@').next());
    if names.any(|name| name.is_some_and(|name| name.trim() == network)) {
        return annotation.to_owned();
    }
    format!("{annotation}, {network}")
}

/// Appends a JSON object, and keeps the formatting of the text. Name and namespace are separate fields, because Multus
/// accepts no slash in names.
fn objects(annotation: &str, network: &str) -> Result<String, InjectError> {
    let wrong = |error: serde_json::Error| {
        let why = format!("it is not a JSON list of networks: {error}");
        InjectError::invalid_annotation(keys::MULTUS_NETWORKS, &why)
    };
    let known: Vec<Value> = serde_json::from_str(annotation).map_err(wrong)?;
    let (namespace, name) = network.split_once('/').unwrap_or(("", network));
    let text = |it: &Value, field| json::text(it, field).unwrap_or_default().to_owned();
    let is_it = |it: &Value| {
        let (of, called) = (text(it, "/namespace"), text(it, "/name"));
        (of.as_str(), called.as_str()) == (namespace, name) || called == network
    };
    if known.iter().any(is_it) {
        return Ok(annotation.to_owned());
    }
    let mut own = json!({"name": name});
    if let Some(fields) = own.as_object_mut().filter(|_| !namespace.is_empty()) {
        fields.insert("namespace".to_owned(), namespace.into());
    }
    let start = annotation
        .trim_end()
        .strip_suffix(']')
        .unwrap_or(annotation)
        .trim_end();
    let comma = if known.is_empty() { "" } else { ", " };
    Ok(format!("{start}{comma}{own}]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn appended(annotation: &str) -> Result<String, InjectError> {
        let config = Config {
            multus_network: "default/istio-cni".to_owned(),
            ..Config::default()
        };
        let pod = json!({"metadata": {"annotations": {(keys::MULTUS_NETWORKS): annotation}}});
        of_networks(&config, &pod).map(|[(_, list)]| list.as_str().unwrap().to_owned())
    }

    #[test]
    fn the_network_is_appended_once_in_the_form_that_is_there() {
        let own = r#"{"name":"istio-cni","namespace":"default"}"#;
        let rows = [
            ("", "default/istio-cni"),
            (" ", "default/istio-cni"),
            ("macvlan", "macvlan, default/istio-cni"),
            ("a/b@eth1,c", "a/b@eth1,c, default/istio-cni"),
            ("[]", &format!("[{own}]")),
            (
                r#"[{"name": "x"}] "#,
                &format!(r#"[{{"name": "x"}}, {own}]"#),
            ),
        ];
        for (annotation, expected) in rows {
            assert_eq!(appended(annotation).unwrap(), expected, "{annotation}");
        }
        for there in [
            "default/istio-cni",
            "a, default/istio-cni@eth9 ,b",
            own,
            r#"{"name": "default/istio-cni"}"#,
        ] {
            let list = if there.starts_with('{') {
                format!("[{there}]")
            } else {
                there.to_owned()
            };
            assert_eq!(appended(&list).unwrap(), list);
        }
    }

    #[test]
    fn a_malformed_list_is_rejected_unless_no_network_is_configured() {
        let message = appended("[{").unwrap_err().to_string();
        assert!(message.contains(keys::MULTUS_NETWORKS), "{message}");
        let pod = json!({"metadata": {"annotations": {(keys::MULTUS_NETWORKS): "[{"}}});
        let [(_, nothing)] = of_networks(&Config::default(), &pod).unwrap();
        assert_eq!(nothing, Value::Null);
    }
}
