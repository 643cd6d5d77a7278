//! Why this service cannot start, and what the API server says when it does not do what it is asked.

use std::path::PathBuf;

use kube::config::{InClusterError, KubeconfigError};

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The API server cannot be asked.
    #[error(transparent)]
    Client(ClientError),
}

/// Why it cannot be known how to reach Kubernetes.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no service account in this pod.
    #[error(
        "cannot reach Kubernetes as a pod's service account; give a file with the setting kubeconfig"
    )]
    ServiceAccount(#[source] InClusterError),
    /// A kubeconfig that cannot be read or says too little.
    #[error("setting kubeconfig: cannot use {}", .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: KubeconfigError,
    },
    /// Keys or certificates that cannot be used.
    #[error("cannot make a client of Kubernetes")]
    Client(#[source] kube::Error),
}

/// What became of a change that the API server was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeError {
    /// The pod is gone, is another one by now, or has changed since it was looked at.
    Changed,
    /// It is refused, or there is no answer: why, in words.
    Failed(String),
}

impl ChangeError {
    /// A pod that is not there is 404. One that is another, or has another resourceVersion, is 409 (a precondition); a
    /// patch that names another UID is 422 and blames `metadata.uid` (apimachinery, `ValidateObjectMetaUpdate`).
    pub(crate) fn of(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Failed(told_of_api(error));
        };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        let blames_uid = causes
            .into_iter()
            .any(|cause| cause.field == "metadata.uid");
        match status.code {
            404 | 409 => Self::Changed,
            422 if blames_uid => Self::Changed,
            _ => Self::Failed(told_of_api(error)),
        }
    }
}

/// What an API call failed of, for people. A refusal names verb and resource.
pub(crate) fn told_of_api(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("the API server answers {}: {}", status.code, status.message);
    }
    format!("the API server does not answer: {}", chain(error))
}

/// An error and its causes, as far as each says something new.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
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
    fn a_refusal_is_one_in_the_servers_words() {
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
