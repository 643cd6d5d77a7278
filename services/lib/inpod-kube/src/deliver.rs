//! An Event on its way to the API server.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};
use tokio::time::{Instant, sleep, timeout};

use crate::{is_final, told};

/// How long the API server may take for one.
const ANSWER: Duration = Duration::from_secs(5);

/// Between two attempts the wait doubles from the first to the second, less up to a half by chance.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// An Event that could not be told for so long is of no use.
const STALE: Duration = Duration::from_secs(300);

/// For so long a server that has just started may refuse what it allows: it answers before it has read who may what.
const LEARNS: Duration = Duration::from_secs(10);

/// Makes an Event about something that happened at `since`, or counts it in the one that is there; again while there is
/// reason to.
///
/// # Errors
///
/// Why it could not be made: the server refuses it, or has not answered until it was of no use any more.
pub async fn deliver(
    recorder: &Recorder,
    event: &Event,
    regarding: &ObjectReference,
    since: Instant,
) -> Result<(), String> {
    let [mut wait, longest] = WAITS;
    let mut refused = None;
    loop {
        let why = match timeout(ANSWER, recorder.publish(event, regarding)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let may_learn = lacks_right(&error)
                    && refused.get_or_insert_with(Instant::now).elapsed() < LEARNS;
                if is_final(&error) && !may_learn {
                    return Err(told(&error));
                }
                told(&error)
            }
            Err(_) => "the API server does not answer in time".to_owned(),
        };
        if since.elapsed() + wait >= STALE {
            return Err(why);
        }
        sleep(wait.mul_f64(fastrand::f64().mul_add(0.5, 0.5))).await;
        wait = longest.min(wait * 2);
    }
}

/// Whether the server refuses who asks. It also says 403 where a namespace ends, and names that as a cause (apimachinery,
/// `NamespaceTerminatingCause`).
fn lacks_right(error: &kube::Error) -> bool {
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
        assert!(lacks_right(&answer(401, "")));
        assert!(lacks_right(&answer(403, "")));
        assert!(!lacks_right(&answer(403, "NamespaceTerminating")));
        assert!(!lacks_right(&answer(404, "")));
        assert!(!lacks_right(&kube::Error::LinesCodecMaxLineLengthExceeded));
    }
}
