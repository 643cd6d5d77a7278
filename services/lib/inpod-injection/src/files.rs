//! Injects into the manifests of files, finding the pod template and the owner of each object.

use serde_json::Value;

use crate::{InjectError, Injector, Outcome, Owner, Request, decide::SkipReason, json, patch};

/// JSON pointers to the pod template by kind; a Pod is a template itself.
const TEMPLATE_POINTERS: &[(&str, &str)] = &[
    ("Pod", ""),
    ("Deployment", "/spec/template"),
    ("StatefulSet", "/spec/template"),
    ("DaemonSet", "/spec/template"),
    ("ReplicaSet", "/spec/template"),
    ("ReplicationController", "/spec/template"),
    ("Job", "/spec/template"),
    ("CronJob", "/spec/jobTemplate/spec/template"),
    ("DeploymentConfig", "/spec/template"),
    ("Rollout", "/spec/template"),
];

#[derive(Debug)]
pub struct Injected {
    /// The kind and name of the object, for messages.
    pub object: String,
    pub result: Result<(), NotInjected>,
    /// The changes relative to the original object.
    pub patch: json_patch::Patch,
}

#[derive(Debug)]
pub enum NotInjected {
    NoPods,
    Skipped(SkipReason),
    Refused(InjectError),
}

/// Injects into an object of any kind, and into each item of a List.
pub fn inject(injector: &Injector, object: &mut Value) -> Vec<Injected> {
    let kind = json::text(object, "/kind").unwrap_or_default().to_owned();
    if kind.ends_with("List") {
        let items = object.get_mut("items").and_then(Value::as_array_mut);
        let items = items.into_iter().flatten();
        return items.flat_map(|item| inject(injector, item)).collect();
    }
    vec![inject_object(injector, &kind, object)]
}

fn inject_object(injector: &Injector, kind: &str, object: &mut Value) -> Injected {
    let before = object.clone();
    let result = injected(injector, kind, object);
    Injected {
        object: format!(
            "{kind} {}",
            json::text(&before, "/metadata/name").unwrap_or("without a name")
        ),
        patch: patch::create(&before, object),
        result,
    }
}

fn injected(injector: &Injector, kind: &str, object: &mut Value) -> Result<(), NotInjected> {
    let found = TEMPLATE_POINTERS.iter().find(|(known, _)| *known == kind);
    let (_, pointer) = found.ok_or(NotInjected::NoPods)?;
    let namespace = json::text(object, "/metadata/namespace")
        .unwrap_or("default")
        .to_owned();
    let owner = owner(kind, object);
    let template = object.pointer_mut(pointer).ok_or(NotInjected::NoPods)?;
    let request = Request {
        pod: template,
        namespace: &namespace,
        owner: owner.as_ref(),
        environment: &[],
    };
    match injector.inject(&request) {
        Ok(Outcome::Injected { pod, .. }) => {
            *template = pod;
            Ok(())
        }
        Ok(Outcome::Skipped(why)) => Err(NotInjected::Skipped(why)),
        Err(error) => Err(NotInjected::Refused(error)),
    }
}

/// Returns the object itself as the owner, even for a kind such as Job, because the manifest does not name a
/// controller.
fn owner(kind: &str, object: &Value) -> Option<Owner> {
    if kind == "Pod" {
        return None;
    }
    let field = |pointer| json::text(object, pointer).unwrap_or_default().to_owned();
    Some(Owner {
        api_version: field("/apiVersion"),
        kind: kind.to_owned(),
        name: field("/metadata/name"),
    })
}

/// Formats the documents of one manifest as YAML.
pub fn to_yaml(objects: &[Value]) -> Result<String, InjectError> {
    let texts = objects.iter().map(serde_saphyr::to_string);
    let texts = texts.collect::<Result<Vec<_>, _>>();
    let failed = |error: serde_saphyr::SerializeError| InjectError::InvalidPod(error.to_string());
    Ok(texts.map_err(failed)?.join("---\n"))
}
