//! Changes pods with one request to the API server each.

use std::time::Duration;

use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{config::Label, error::ChangeError, escalation::Change, events::REPORTER, pods::Pod};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) async fn change(
    client: &Client,
    pod: &Pod,
    change: Change,
    label: &Label,
) -> Result<(), ChangeError> {
    let set_label =
        |value| json!({"metadata": {"uid": pod.pod.uid.as_str(), "labels": {&label.key: value}}});
    let asked = async {
        match change {
            Change::Label => {
                let change = set_label(json!(label.value));
                patch(client, pod, &Patch::Merge(change)).await
            }
            Change::Unlabel => {
                let change = set_label(Value::Null);
                patch(client, pod, &Patch::Merge(change)).await
            }
            Change::Delete => delete(client, pod).await,
        }
    };
    within_timeout(asked).await
}

/// Sets a condition of the pod in the version that was last seen, so that a later value of the condition is never
/// overwritten. A strategic merge patch merges conditions by type.
pub(crate) async fn set_condition(
    client: &Client,
    pod: &Pod,
    condition: &k8s::PodCondition,
) -> Result<(), ChangeError> {
    let change = Patch::Strategic(json!({
        "metadata": {"uid": pod.pod.uid.as_str(), "resourceVersion": pod.version},
        "status": {"conditions": [condition]},
    }));
    within_timeout(patch(client, pod, &change)).await
}

async fn within_timeout(asked: impl Future<Output = kube::Result<()>>) -> Result<(), ChangeError> {
    match timeout(REQUEST_TIMEOUT, asked).await {
        Ok(answer) => answer.map_err(|error| ChangeError::of(&error)),
        Err(_) => Err(ChangeError::Failed(
            "the API server does not answer in time".to_owned(),
        )),
    }
}

/// Patches the pod through `pods/status`, because the right to patch the status does not include the right to change
/// pod specs. The UID in the patch protects another pod of the same name.
async fn patch(client: &Client, pod: &Pod, change: &Patch<Value>) -> kube::Result<()> {
    let namespace = pod.pod.namespace.as_str();
    let api = Api::<PartialObjectMeta<k8s::Pod>>::namespaced(client.clone(), namespace);
    let params = PatchParams {
        field_manager: Some(REPORTER.to_owned()),
        ..PatchParams::default()
    };
    let patched = api.patch_status(pod.pod.name.as_str(), &params, change);
    patched.await.map(drop)
}

/// Deletes the pod only in the version that was diagnosed; a pod that has changed is diagnosed again first.
async fn delete(client: &Client, pod: &Pod) -> kube::Result<()> {
    let api = Api::<k8s::Pod>::namespaced(client.clone(), pod.pod.namespace.as_str());
    let params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(pod.pod.uid.to_string()),
        resource_version: Some(pod.version.clone()),
    });
    api.delete(pod.pod.name.as_str(), &params).await.map(drop)
}
