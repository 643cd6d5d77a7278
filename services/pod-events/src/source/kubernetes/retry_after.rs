//! Honors `Retry-After` (RFC 9110, section 10.2.3), which the API server sends with 429 from priority and fairness,
//! and with 503 while it shuts down.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The longest honored delay, because a longer delay may be the mistake of a proxy.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The latest time until which the server asked clients to wait.
#[derive(Clone, Debug, Default)]
pub(super) struct RetryAfter(Arc<Mutex<Option<Instant>>>);

impl RetryAfter {
    pub(super) fn observe<B>(&self, response: &http::Response<B>) {
        let status = response.status();
        if !status.is_client_error() && !status.is_server_error() {
            return;
        }
        let after = response.headers().get(http::header::RETRY_AFTER);
        let seconds = after.and_then(|text| text.to_str().ok()?.trim().parse().ok());
        if let Some(seconds) = seconds {
            let until = Instant::now() + MAX_RETRY_AFTER.min(Duration::from_secs(seconds));
            let mut until_current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *until_current = (*until_current).max(Some(until));
        }
    }

    pub(super) fn remaining(&self) -> Duration {
        let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(code: u16, after: &str) -> http::Response<()> {
        let response = http::Response::builder().status(code);
        response.header("Retry-After", after).body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_is_honored_and_the_latest_time_wins() {
        let retry_after = RetryAfter::default();
        assert_eq!(retry_after.remaining(), Duration::ZERO);
        retry_after.observe(&response(429, "7"));
        retry_after.observe(&response(503, "2"));
        assert_eq!(retry_after.remaining(), Duration::from_secs(7));
        tokio::time::advance(Duration::from_secs(8)).await;
        assert_eq!(retry_after.remaining(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_is_bounded_and_ignored_if_malformed_or_sent_with_success() {
        let retry_after = RetryAfter::default();
        for odd in [
            response(200, "7"),
            response(429, "soon"),
            response(429, "-1"),
        ] {
            retry_after.observe(&odd);
            assert_eq!(retry_after.remaining(), Duration::ZERO);
        }
        retry_after.observe(&response(429, "86400"));
        assert_eq!(retry_after.remaining(), MAX_RETRY_AFTER);
    }
}
