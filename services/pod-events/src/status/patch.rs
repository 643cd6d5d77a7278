//! Patches the annotation of a pod.

use std::time::Duration;

use inpod_types::keys;
use k8s_openapi::api::core::v1 as k8s;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::{PartialObjectMeta, Status},
};
use serde_json::json;
use tokio::time::timeout;

use super::queue::{PatchOutcome, PatchRequest};

const PATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// The annotation's owner in the pod's `managedFields`.
const FIELD_MANAGER: &str = super::REPORTER;

/// Patches the subresource `pods/status`, because permission for the subresource grants no write access to labels and
/// spec.
pub(crate) async fn patch(client: Client, request: &PatchRequest) -> PatchOutcome {
    let (namespace, name) = &request.key;
    let api = Api::<PartialObjectMeta<k8s::Pod>>::namespaced(client, namespace.as_str());
    let annotations = json!({keys::REDIRECTION: request.annotation.value()});
    let change = Patch::Merge(
        json!({"metadata": {"uid": request.uid.as_str(), "annotations": annotations}}),
    );
    let params = PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    match timeout(
        PATCH_TIMEOUT,
        api.patch_status(name.as_str(), &params, &change),
    )
    .await
    {
        Ok(Ok(_)) => PatchOutcome::Accepted,
        Ok(Err(error)) => outcome_of(&error),
        Err(_) => PatchOutcome::Unanswered("the API server does not answer in time".to_owned()),
    }
}

fn outcome_of(error: &kube::Error) -> PatchOutcome {
    let message = inpod_kube::describe_error(error);
    let kube::Error::Api(status) = error else {
        return PatchOutcome::Unanswered(message);
    };
    match status.code {
        404 => PatchOutcome::Gone,
        _ if has_other_uid(status) => PatchOutcome::Gone,
        // Client errors are returned before anything is written.
        400..500 => PatchOutcome::Refused(message),
        _ => PatchOutcome::Unanswered(message),
    }
}

/// Returns whether the pod of the same name has another UID. If storage checks the UID, only the message of the 409
/// shows the conflict.
fn has_other_uid(status: &Status) -> bool {
    let is_precondition = status.code == 409 && status.message.contains("UID");
    is_precondition || inpod_kube::is_uid_conflict(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(code: u16, message: &str) -> PatchOutcome {
        let status = Status {
            code,
            message: message.to_owned(),
            ..Status::default()
        };
        outcome_of(&kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_pod_that_is_not_there_or_is_another_needs_no_patch() {
        assert_eq!(outcome(404, "pods \"web\" not found"), PatchOutcome::Gone);
        let other = "Operation cannot be fulfilled on pods \"web\": Precondition failed: UID in precondition: a, UID in object meta: b";
        assert_eq!(outcome(409, other), PatchOutcome::Gone);
        let immutable: Status = serde_json::from_value(json!({
            "code": 422,
            "message": "Pod \"web\" is invalid: metadata.uid: Invalid value: \"a\": field is immutable",
            "details": {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid"}]},
        }))
        .unwrap();
        let outcome = outcome_of(&kube::Error::Api(Box::new(immutable)));
        assert_eq!(outcome, PatchOutcome::Gone);
    }

    #[test]
    fn a_refusal_is_known_not_to_be_written_and_a_failure_of_the_server_is_not() {
        for code in [401, 403, 409, 422, 429] {
            assert!(
                matches!(outcome(code, "no"), PatchOutcome::Refused(_)),
                "{code}"
            );
        }
        for code in [500, 503, 504] {
            assert!(
                matches!(outcome(code, "no"), PatchOutcome::Unanswered(_)),
                "{code}"
            );
        }
    }
}
