//! Access to the API server, shared by the services of a node.
//!
//! Each service makes requests of its own and decides what the results mean.

mod client;
mod event;
mod publish;

pub use client::{ClientError, client_config};
pub use event::{regarding, regarding_node, reporter, truncate_note};
pub use publish::{publish_event, with_jitter};

use inpod_types::with_causes;

/// Describes a failed call or watch. If the server rejects the call, its message names verb and resource.
pub fn describe_error(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("the API server answers {}: {}", status.code, status.message);
    }
    format!("the API server does not answer: {}", with_causes(error))
}

/// Returns whether a retry would fail, too, because the server rejects the call itself.
pub fn is_final(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
}

/// Returns whether the name belongs to another pod by now. The UID is immutable, so that the server rejects a patch
/// with another UID with 422, and a precondition with 409, both with the cause `metadata.uid` (apimachinery,
/// `ValidateObjectMetaUpdate`).
pub fn is_uid_conflict(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    matches!(status.code, 409 | 422) && causes.any(|cause| cause.field == "metadata.uid")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(code: u16, field: &str) -> kube::core::Status {
        let causes = json!([{"field": field}]);
        let status = json!({"code": code, "message": "no", "details": {"causes": causes}});
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn an_answer_is_told_by_its_code_and_words() {
        let error = kube::Error::Api(Box::new(answer(403, "")));
        assert_eq!(describe_error(&error), "the API server answers 403: no");
    }

    #[test]
    fn only_what_the_server_answers_itself_is_final_and_429_is_not() {
        for (code, expected) in [
            (400, true),
            (404, true),
            (422, true),
            (429, false),
            (500, false),
        ] {
            let error = kube::Error::Api(Box::new(answer(code, "")));
            assert_eq!(is_final(&error), expected, "{code}");
        }
        assert!(!is_final(&kube::Error::LinesCodecMaxLineLengthExceeded));
    }

    #[test]
    fn another_uid_is_blamed_by_its_field() {
        assert!(is_uid_conflict(&answer(409, "metadata.uid")));
        assert!(is_uid_conflict(&answer(422, "metadata.uid")));
        assert!(!is_uid_conflict(&answer(422, "metadata.name")));
        assert!(!is_uid_conflict(&answer(403, "metadata.uid")));
    }
}
