//! One patch of one annotation.

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

use super::ledger::{Answer, Order};

/// How long the API server may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Who changes the annotation, in the pod's `managedFields`.
const MANAGER: &str = super::REPORTER;

/// Sends an order, to `pods/status`: the right to write there is no right on labels and spec of pods.
pub(super) async fn patch(client: Client, order: &Order) -> Answer {
    let (namespace, name) = &order.key;
    let api = Api::<PartialObjectMeta<k8s::Pod>>::namespaced(client, namespace.as_str());
    let annotations = json!({keys::REDIRECTION: order.mark.value()});
    let change =
        Patch::Merge(json!({"metadata": {"uid": order.uid.as_str(), "annotations": annotations}}));
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    match timeout(ANSWER, api.patch_status(name.as_str(), &params, &change)).await {
        Ok(Ok(_)) => Answer::Accepted,
        Ok(Err(error)) => answer_of(&error),
        Err(_) => Answer::Unanswered("the API server does not answer in time".to_owned()),
    }
}

fn answer_of(error: &kube::Error) -> Answer {
    let words = inpod_kube::told(error);
    let kube::Error::Api(status) = error else {
        return Answer::Unanswered(words);
    };
    match status.code {
        404 => Answer::Gone,
        _ if is_of_another(status) => Answer::Gone,
        // Before anything was written.
        400..500 => Answer::Refused(words),
        _ => Answer::Unanswered(words),
    }
}

/// Whether the pod of that name has another UID. Where that is checked as a precondition of storage, only the words of
/// the 409 say so.
fn is_of_another(status: &Status) -> bool {
    let is_precondition = status.code == 409 && status.message.contains("UID");
    is_precondition || inpod_kube::blames_uid(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, message: &str) -> Answer {
        let status = Status {
            code,
            message: message.to_owned(),
            ..Status::default()
        };
        answer_of(&kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_pod_that_is_not_there_or_is_another_needs_no_patch() {
        assert_eq!(answer(404, "pods \"web\" not found"), Answer::Gone);
        let other = "Operation cannot be fulfilled on pods \"web\": Precondition failed: UID in precondition: a, UID in object meta: b";
        assert_eq!(answer(409, other), Answer::Gone);
        let immutable: Status = serde_json::from_value(json!({
            "code": 422,
            "message": "Pod \"web\" is invalid: metadata.uid: Invalid value: \"a\": field is immutable",
            "details": {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid"}]},
        }))
        .unwrap();
        let answer = answer_of(&kube::Error::Api(Box::new(immutable)));
        assert_eq!(answer, Answer::Gone);
    }

    #[test]
    fn a_refusal_is_known_not_to_be_written_and_a_failure_of_the_server_is_not() {
        for code in [401, 403, 409, 422, 429] {
            assert!(matches!(answer(code, "no"), Answer::Refused(_)), "{code}");
        }
        for code in [500, 503, 504] {
            assert!(
                matches!(answer(code, "no"), Answer::Unanswered(_)),
                "{code}"
            );
        }
    }
}
