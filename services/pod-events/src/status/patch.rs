//! Patches the annotation of a pod.

use std::time::Duration;

use inpod_types::{PodRef, keys};
use k8s_openapi::{api::core::v1 as k8s, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{condition::DesiredCondition, queue::PatchOutcome};
use crate::pod::ShownCondition;

const PATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// A value of `ambient.istio.io/redirection`, by which peers see whether a pod is redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Annotation {
    Enabled,
    /// The pod belongs in the mesh, but no ztunnel has acknowledged the sandbox yet.
    Pending,
    Absent,
}

impl Annotation {
    pub(crate) fn value(self) -> Option<&'static str> {
        match self {
            Self::Enabled => Some(keys::REDIRECTION_ENABLED),
            Self::Pending => Some(keys::REDIRECTION_PENDING),
            Self::Absent => None,
        }
    }
}

/// The parts of a pod that inpod writes. A part that is `None` may have any value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DesiredStatus {
    pub(crate) annotation: Option<Annotation>,
    pub(crate) condition: Option<DesiredCondition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PatchRequest {
    pub(crate) pod: PodRef,
    pub(crate) status: DesiredStatus,
    /// The condition before the patch.
    pub(crate) condition_before: Option<ShownCondition>,
}

impl PatchRequest {
    /// Returns a strategic merge patch.
    fn to_patch(&self, now: Timestamp) -> Value {
        let uid = self.pod.uid.as_str();
        let metadata = match self.status.annotation {
            Some(annotation) => {
                json!({"uid": uid, "annotations": {keys::REDIRECTION: annotation.value()}})
            }
            None => json!({"uid": uid}),
        };
        let Some(condition) = &self.status.condition else {
            return json!({"metadata": metadata});
        };
        let condition = condition.to_patch(self.condition_before.as_ref(), now);
        json!({"metadata": metadata, "status": {"conditions": [condition]}})
    }
}

/// Patches the subresource `pods/status`, because permission for the subresource grants no write access to labels and
/// spec.
pub(crate) async fn patch(client: Client, request: PatchRequest) -> (PatchRequest, PatchOutcome) {
    let pod = &request.pod;
    let api = Api::<PartialObjectMeta<k8s::Pod>>::namespaced(client, pod.namespace.as_str());
    let change = Patch::Strategic(request.to_patch(Timestamp::now()));
    let params = PatchParams::apply(super::REPORTER);
    let patched = api.patch_status(pod.name.as_str(), &params, &change);
    let outcome = match timeout(PATCH_TIMEOUT, patched).await {
        Ok(Ok(_)) => PatchOutcome::Accepted,
        Ok(Err(error)) => outcome_of(&error),
        Err(_) => PatchOutcome::Unanswered("the API server does not answer in time".to_owned()),
    };
    (request, outcome)
}

fn outcome_of(error: &kube::Error) -> PatchOutcome {
    let message = inpod_kube::describe_error(error);
    let kube::Error::Api(status) = error else {
        return PatchOutcome::Unanswered(message);
    };
    match status.code {
        404 => PatchOutcome::Gone,
        // The pod of the same name has another UID. If storage checks the UID, only the message shows the conflict.
        409 if status.message.contains("UID") => PatchOutcome::Gone,
        _ if inpod_kube::is_uid_conflict(status) => PatchOutcome::Gone,
        // Client errors are returned before anything is written.
        400..500 => PatchOutcome::Refused(message),
        _ => PatchOutcome::Unanswered(message),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

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
        let immutable = json!({"code": 422, "details": {"causes": [{"field": "metadata.uid"}]}});
        let error = kube::Error::Api(serde_json::from_value(immutable).unwrap());
        assert_eq!(outcome_of(&error), PatchOutcome::Gone);
    }

    #[test]
    fn a_client_error_is_a_refusal_and_a_server_error_no_answer() {
        for code in [401, 403, 409, 422, 429] {
            let is_refused = matches!(outcome(code, "no"), PatchOutcome::Refused(_));
            assert!(is_refused, "{code}");
        }
        for code in [500, 503, 504] {
            let is_unanswered = matches!(outcome(code, "no"), PatchOutcome::Unanswered(_));
            assert!(is_unanswered, "{code}");
        }
    }
}
