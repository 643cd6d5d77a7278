use std::time::Duration;

use inpod_types::{Failure, Reason};
use tower::ServiceExt as _;

use super::{Next, Request, Response};
use crate::deadline::timeout;

/// The time left for the response to arrive before the caller's deadline.
const MARGIN: Duration = Duration::from_millis(100);

/// Calls the handler, and responds for a handler that is still at work shortly before the caller's deadline, because the
/// timers of tonic and the client would report neither reason nor remedy.
///
/// The handler is dropped, as when a caller disconnects, so work that must be completed runs in a task of its own. A
/// stream has a deadline only until the stream is open.
pub(super) async fn call_next(call: Request, next: impl Next) -> Response {
    let timeout = timeout(call.headers());
    let answer = next.oneshot(call);
    let Some(timeout) = timeout else {
        let Ok(answer) = answer.await;
        return answer;
    };
    match tokio::time::timeout(answer_in(timeout), answer).await {
        Ok(Ok(answer)) => answer,
        Err(_elapsed) => {
            let message = format!("not done within the caller's {timeout:?}");
            tracing::warn!(?timeout, "A call exceeded its deadline");
            let failure = Failure::new(Reason::DeadlineExceeded, message);
            inpod_proto::into_status(&failure).into_http()
        }
    }
}

/// Returns the time for the handler, at least nine tenths of a short timeout.
fn answer_in(timeout: Duration) -> Duration {
    timeout - MARGIN.min(timeout / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_comes_a_tenth_of_a_second_early_or_a_tenth_of_a_short_time() {
        let answer = |millis| answer_in(Duration::from_millis(millis)).as_millis();
        assert_eq!(
            (answer(30_000), answer(1_000), answer(50), answer(0)),
            (29_900, 900, 45, 0)
        );
    }
}
