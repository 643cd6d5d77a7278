//! Errors of the requests that change a pod.

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeError {
    /// The pod is gone, was replaced, or has changed since its diagnosis.
    Changed,
    /// The API server refused the request or did not respond; holds the reason.
    Failed(String),
}

impl ChangeError {
    /// Converts an error of the API server: a missing pod is 404, a failed precondition on the resourceVersion is 409.
    pub(crate) fn of(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Failed(inpod_kube::describe_error(error));
        };
        match status.code {
            404 | 409 => Self::Changed,
            _ if inpod_kube::is_uid_conflict(status) => Self::Changed,
            _ => Self::Failed(inpod_kube::describe_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    fn of(status: serde_json::Value) -> ChangeError {
        let status: Status = serde_json::from_value(status).unwrap();
        ChangeError::of(&kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_pod_that_is_gone_another_or_changed_is_no_failure() {
        for code in [404, 409] {
            assert_eq!(of(json!({"code": code})), ChangeError::Changed);
        }
        let uid = json!({"code": 422, "details": {"causes": [{"field": "metadata.uid"}]}});
        assert_eq!(of(uid), ChangeError::Changed);
    }

    #[test]
    fn a_refusal_contains_the_servers_message() {
        for code in [400, 403, 422, 429, 500, 503] {
            let refused = of(json!({"code": code, "message": "because"}));
            let ChangeError::Failed(why) = refused else {
                panic!("{code}: {refused:?}");
            };
            assert!(
                why.contains("because") && why.contains(&code.to_string()),
                "{why}"
            );
        }
    }
}
