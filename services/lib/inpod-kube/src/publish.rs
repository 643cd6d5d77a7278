//! Publishes Events with retries.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::time::{Instant, sleep, timeout};

use crate::{describe_error, is_final};

const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);

/// The first and the longest interval; it doubles, and up to a half is subtracted at random.
const RETRY_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// The age at which Events are dropped.
const MAX_EVENT_AGE: Duration = Duration::from_secs(300);

/// For retries of 401 and 403: an API server answers before it has loaded RBAC rules.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(10);

/// Publishes what happened at `since`, or counts up the existing Event. Retries while that can help.
///
/// # Errors
///
/// If the server rejects the Event, or did not respond until it was too old.
pub async fn publish_event(
    recorder: &Recorder,
    event: &Event,
    regarding: &ObjectReference,
    since: Instant,
) -> Result<(), String> {
    let [mut wait, longest] = RETRY_INTERVALS;
    let mut denied_since = None;
    loop {
        let why = match timeout(PUBLISH_TIMEOUT, recorder.publish(event, regarding)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let within_grace = is_denied(&error)
                    && denied_since.get_or_insert_with(Instant::now).elapsed() < FORBIDDEN_GRACE;
                if is_final(&error) && !within_grace {
                    return Err(describe_error(&error));
                }
                describe_error(&error)
            }
            Err(_) => "the API server does not answer in time".to_owned(),
        };
        if since.elapsed() + wait >= MAX_EVENT_AGE {
            return Err(why);
        }
        sleep(wait.mul_f64(fastrand::f64().mul_add(0.5, 0.5))).await;
        wait = longest.min(wait * 2);
    }
}

/// Excludes 403s for a namespace being deleted, a cause of its own (apimachinery, `NamespaceTerminatingCause`).
fn is_denied(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    matches!(status.code, 401 | 403) && !causes.any(|cause| cause.reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn who_asks_is_refused_by_401_and_403_but_not_where_a_namespace_ends() {
        let answer = |code: u16, reason: &str| {
            let status = json!({"code": code, "details": {"causes": [{"reason": reason}]}});
            kube::Error::Api(serde_json::from_value(status).unwrap())
        };
        assert!(is_denied(&answer(401, "")));
        assert!(is_denied(&answer(403, "")));
        assert!(!is_denied(&answer(403, "NamespaceTerminating")));
        assert!(!is_denied(&answer(404, "")));
        assert!(!is_denied(&kube::Error::LinesCodecMaxLineLengthExceeded));
    }
}
