//! Publishes Events, and retries if the API server does not respond.

use std::time::Duration;

use inpod_types::Backoff;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::time::{Instant, sleep, timeout};

use crate::{describe_error, is_final};

const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));

/// The age at which an unpublished Event is dropped.
const MAX_EVENT_AGE: Duration = Duration::from_secs(300);

/// The time for which 401 and 403 are retried, because an API server answers before its RBAC rules are loaded.
const FORBIDDEN_GRACE: Duration = Duration::from_secs(10);

/// Publishes an Event of the time `since`, or counts up the existing Event, and retries as long as a retry can help.
///
/// # Errors
///
/// Fails if the server rejects the Event, or does not respond until the Event is too old.
pub async fn publish_event(
    recorder: &Recorder,
    event: &Event,
    regarding: &ObjectReference,
    since: Instant,
) -> Result<(), String> {
    let (mut failures, mut denied_since) = (0, None);
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
        let wait = RETRY.delay(failures);
        if since.elapsed() + wait >= MAX_EVENT_AGE {
            return Err(why);
        }
        sleep(with_jitter(wait)).await;
        failures += 1;
    }
}

/// Returns between one half and the whole of a delay, so that clients that failed together do not retry together.
pub fn with_jitter(delay: Duration) -> Duration {
    delay.mul_f64(fastrand::f64().mul_add(0.5, 0.5))
}

/// Returns whether the server denies the call with 401 or 403. A 403 for a namespace being deleted has a cause of its
/// own (apimachinery, `NamespaceTerminatingCause`) and does not count.
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
    fn jitter_takes_up_to_half_a_delay_and_varies() {
        let delay = Duration::from_secs(10);
        let delays: Vec<_> = (0..100).map(|_| with_jitter(delay)).collect();
        assert!(delays.iter().all(|it| (delay / 2..=delay).contains(it)));
        assert!(delays.iter().any(|it| *it != delays[0]));
    }

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
