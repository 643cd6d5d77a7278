//! When the API server wants to be asked again: what it said with `Retry-After` (RFC 9110, section 10.2.3), which
//! comes with 429 from its priority and fairness and with 503 while it stops.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The longest rest that a server is given, whatever it asks for: it may be a proxy's mistake.
const LONGEST: Duration = Duration::from_secs(60);

/// What the server last asked for. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace(Arc<Mutex<Option<Instant>>>);

impl Pace {
    /// Reads an answer.
    pub(super) fn read<B>(&self, answer: &http::Response<B>) {
        let status = answer.status();
        if !status.is_client_error() && !status.is_server_error() {
            return;
        }
        let after = answer.headers().get(http::header::RETRY_AFTER);
        let seconds = after.and_then(|text| text.to_str().ok()?.trim().parse().ok());
        if let Some(seconds) = seconds {
            let until = Instant::now() + LONGEST.min(Duration::from_secs(seconds));
            let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *known = (*known).max(Some(until));
        }
    }

    /// For how long it is not to be asked yet.
    pub(super) fn rest(&self) -> Duration {
        let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, after: &str) -> http::Response<()> {
        let answer = http::Response::builder().status(code);
        answer.header("Retry-After", after).body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_that_names_a_time_is_heeded_and_the_latest_time_holds() {
        let pace = Pace::default();
        assert_eq!(pace.rest(), Duration::ZERO);
        pace.read(&answer(429, "7"));
        pace.read(&answer(503, "2"));
        assert_eq!(pace.rest(), Duration::from_secs(7));
        tokio::time::advance(Duration::from_secs(8)).await;
        assert_eq!(pace.rest(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_that_is_too_long_no_number_or_no_refusals_is_not() {
        let pace = Pace::default();
        for odd in [answer(200, "7"), answer(429, "soon"), answer(429, "-1")] {
            pace.read(&odd);
            assert_eq!(pace.rest(), Duration::ZERO);
        }
        pace.read(&answer(429, "86400"));
        assert_eq!(pace.rest(), LONGEST);
    }
}
