//! The variables that describe the pod and its workload.

use std::num::NonZeroU16;

use inpod_types::{keys, lists};
use serde_json::Value;

use super::{Pairs, some};
use crate::{Request, error::InjectError, is_proxy, json, owner::Owner, proxy::ProxySettings};

/// The maximum length of a label's value (apimachinery, validation.LabelValueMaxLength).
const MAX_LABEL_LENGTH: usize = 63;

fn namespace<'a>(pod: &'a Value, request: &Request<'a>) -> &'a str {
    let own = json::text(pod, "/metadata/namespace").filter(|own| !own.is_empty());
    own.unwrap_or(request.namespace)
}

pub(super) fn of_pod(pod: &Value, request: &Request<'_>) -> Pairs<7> {
    let own = || {
        json::containers(pod, "containers")
            .iter()
            .filter(|it| !is_proxy(it))
    };
    let names: Vec<_> = own().filter_map(json::name).collect();
    let ports: Vec<_> = own()
        .flat_map(|it| json::list(it, "ports").to_vec())
        .collect();
    let first = |key| {
        some(
            json::annotation(pod, key)
                .or_else(|| names.first().copied())
                .unwrap_or_default(),
        )
    };
    let account = json::text(pod, "/spec/serviceAccountName").filter(|name| !name.is_empty());
    [
        (
            "pod.name",
            some(json::text(pod, "/metadata/name").unwrap_or_default()),
        ),
        ("pod.namespace", some(namespace(pod, request))),
        ("pod.serviceAccount", account.unwrap_or("default").into()),
        ("pod.ports", Value::from(ports).to_string().into()),
        ("pod.containers", some(&names.join(","))),
        (
            "pod.defaultContainer",
            first("kubectl.kubernetes.io/default-container"),
        ),
        (
            "pod.defaultLogsContainer",
            first("kubectl.kubernetes.io/default-logs-container"),
        ),
    ]
}

pub(super) fn of_workload(pod: &Value, request: &Request<'_>) -> Pairs<4> {
    let Owner {
        api_version,
        kind,
        name,
    } = &Owner::of(pod);
    let (namespace, kind) = (namespace(pod, request), kind.to_lowercase());
    let path = format!("kubernetes://apis/{api_version}/namespaces/{namespace}/{kind}s/{name}");
    let label = |keys: &[&str]| {
        let mut labels = keys.iter().filter_map(|key| json::label(pod, key));
        labels.find(|value| !value.is_empty()).map(str::to_owned)
    };
    let names = [keys::CANONICAL_NAME, "app.kubernetes.io/name", "app"];
    let revisions = [
        keys::CANONICAL_REVISION,
        "app.kubernetes.io/version",
        "version",
    ];
    let canonical = label(&names).unwrap_or_else(|| name.clone());
    [
        ("workload.name", some(name)),
        (
            "workload.owner",
            if name.is_empty() {
                Value::Null
            } else {
                path.into()
            },
        ),
        ("canonical.name", some(&as_label(&canonical))),
        (
            "canonical.revision",
            label(&revisions)
                .unwrap_or_else(|| "latest".to_owned())
                .into(),
        ),
    ]
}

/// Cuts a text to a valid value of a label, which must not end in punctuation.
fn as_label(text: &str) -> String {
    let start: String = text.chars().take(MAX_LABEL_LENGTH).collect();
    let is_mark = |c: char| "-_.".contains(c);
    start.trim_end_matches(is_mark).to_owned()
}

/// Appends the agent's port to the exempt inbound ports, unless the port is already exempt.
pub(super) fn of_interception(pod: &Value, proxy: &ProxySettings) -> Result<Pairs<2>, InjectError> {
    let annotation = json::annotation(pod, keys::SIDECAR_EXCLUDE_INBOUND_PORTS);
    let read = |list: &str| {
        let invalid =
            |error| InjectError::invalid_annotation(keys::SIDECAR_EXCLUDE_INBOUND_PORTS, &error);
        lists::excluded_inbound(list).map_err(invalid)
    };
    let all = read(annotation.unwrap_or_default())?;
    let port = proxy.status_port;
    let is_left_alone = NonZeroU16::new(port).is_none_or(|port| all.contains(&port));
    let list = match annotation.filter(|annotation| !annotation.trim().is_empty()) {
        None if port == 0 => annotation.unwrap_or_default().to_owned(),
        None => port.to_string(),
        Some(annotation) if is_left_alone => annotation.to_owned(),
        Some(annotation) => format!("{annotation},{port}"),
    };
    read(&list)?;
    Ok([
        ("interception.mode", proxy.interception.as_str().into()),
        ("interception.excludeInboundPorts", some(&list)),
    ])
}
