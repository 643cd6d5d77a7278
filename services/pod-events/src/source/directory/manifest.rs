//! Parses the documents of a manifest file: Pods, Namespaces, and Lists of them.

use std::{fmt, io};

use inpod_types::NodeName;
use k8s_openapi::api::core::v1 as k8s;
use serde_json::Value;

use crate::{
    pod::{InvalidManifest, Namespace, Pod},
    source::Scope,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Manifest {
    Pod(Box<Pod>),
    Namespace(Namespace),
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "Pod {}", pod.pod),
            Self::Namespace(namespace) => write!(f, "Namespace {}", namespace.name),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ManifestError {
    #[error("cannot read it")]
    Read(#[from] io::Error),
    #[error("the file is empty; remove the file to remove its pods")]
    Empty,
    #[error("invalid YAML: {0}")]
    Yaml(String),
    #[error("{0} does not match the Kubernetes schema")]
    Form(String, #[source] serde_json::Error),
    #[error("kind {0:?} is not supported; use Pods, Namespaces and Lists of them")]
    Kind(String),
    #[error("{0} cannot be used")]
    Unusable(String, #[source] InvalidManifest),
    #[error("{pod} is bound to node {of}, but this node is {here}")]
    OtherNode {
        pod: String,
        of: NodeName,
        here: NodeName,
    },
}

/// Parses the documents of a text. An empty List counts as a document.
pub(super) fn parse(text: &str, scope: &Scope) -> Result<Vec<Manifest>, ManifestError> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)
        .map_err(|error| ManifestError::Yaml(error.to_string()))?;
    if documents.iter().all(Value::is_null) {
        return Err(ManifestError::Empty);
    }
    let mut manifests = Vec::new();
    for document in documents {
        add(document, scope, &mut manifests)?;
    }
    Ok(manifests)
}

fn add(
    mut document: Value,
    scope: &Scope,
    manifests: &mut Vec<Manifest>,
) -> Result<(), ManifestError> {
    let kind = document
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    match kind.as_str() {
        // The document between two `---` is empty.
        "" if document.is_null() => Ok(()),
        "List" | "PodList" | "NamespaceList" => {
            let items = document
                .get_mut("items")
                .and_then(Value::as_array_mut)
                .map(std::mem::take);
            items
                .unwrap_or_default()
                .into_iter()
                .try_for_each(|item| add(item, scope, manifests))
        }
        "Pod" => pod(document, &scope.node).map(|pod| manifests.push(Manifest::Pod(Box::new(pod)))),
        "Namespace" => namespace(document, scope)
            .map(|namespace| manifests.push(Manifest::Namespace(namespace))),
        _ => Err(ManifestError::Kind(kind)),
    }
}

/// Returns the title of an object for errors, for example `Pod shop/web`.
fn title(kind: &str, document: &Value) -> String {
    let field = |name| {
        document
            .pointer(name)
            .and_then(Value::as_str)
            .unwrap_or("?")
    };
    format!(
        "{kind} {}/{}",
        field("/metadata/namespace"),
        field("/metadata/name")
    )
}

fn pod(document: Value, node: &NodeName) -> Result<Pod, ManifestError> {
    let title = title("Pod", &document);
    let pod: k8s::Pod = serde_json::from_value(document)
        .map_err(|error| ManifestError::Form(title.clone(), error))?;
    let pod = Pod::try_from(pod).map_err(|error| ManifestError::Unusable(title.clone(), error))?;
    match &pod.node {
        Some(of) if of != node => Err(ManifestError::OtherNode {
            pod: title,
            of: of.clone(),
            here: node.clone(),
        }),
        Some(_) | None => Ok(pod),
    }
}

fn namespace(document: Value, scope: &Scope) -> Result<Namespace, ManifestError> {
    let title = title("Namespace", &document);
    let namespace: k8s::Namespace = serde_json::from_value(document)
        .map_err(|error| ManifestError::Form(title.clone(), error))?;
    Namespace::of(namespace, &scope.namespace_labels)
        .map_err(|error| ManifestError::Unusable(title, error))
}
