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
    let asked = async {
        match change {
            Change::Label => patch(client, pod, &label.key, &json!(label.value)).await,
            Change::Unlabel => patch(client, pod, &label.key, &Value::Null).await,
            Change::Delete => delete(client, pod).await,
        }
    };
    match timeout(REQUEST_TIMEOUT, asked).await {
        Ok(answer) => answer.map_err(|error| ChangeError::of(&error)),
        Err(_) => Err(ChangeError::Failed(
            "the API server does not answer in time".to_owned(),
        )),
    }
}

/// Patches the labels through `pods/status`, because the right to patch the status does not include the right to change
/// pod specs. The UID in the patch protects another pod of the same name.
async fn patch(client: &Client, pod: &Pod, key: &str, value: &Value) -> kube::Result<()> {
    let namespace = pod.pod.namespace.as_str();
    let api = Api::<PartialObjectMeta<k8s::Pod>>::namespaced(client.clone(), namespace);
    let change =
        Patch::Merge(json!({"metadata": {"uid": pod.pod.uid.as_str(), "labels": {key: value}}}));
    let params = PatchParams {
        field_manager: Some(REPORTER.to_owned()),
        ..PatchParams::default()
    };
    let patched = api.patch_status(pod.pod.name.as_str(), &params, &change);
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
