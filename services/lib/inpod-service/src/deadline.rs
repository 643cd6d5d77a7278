use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;

/// The timeout of a call without a deadline, equal to the plugin's default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the deadline from the header `grpc-timeout`, or else 30 s from now.
pub fn deadline<T>(request: &tonic::Request<T>) -> Instant {
    Instant::now() + timeout(request.metadata().as_ref()).unwrap_or(DEFAULT_TIMEOUT)
}

/// Parses at most eight digits and a unit (gRPC over HTTP/2, "Timeout").
pub(crate) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let amount = u64::from(digits.parse::<u32>().ok().filter(|_| digits.len() <= 8)?);
    match unit {
        "H" => Some(Duration::from_secs(amount * 3600)),
        "M" => Some(Duration::from_secs(amount * 60)),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().unwrap());
        timeout(&headers)
    }

    #[test]
    fn every_unit_is_understood() {
        assert_eq!(of("30S"), Some(Duration::from_secs(30)));
        assert_eq!(of("29999917u"), Some(Duration::from_micros(29_999_917)));
        assert_eq!(of("2M"), Some(Duration::from_secs(120)));
        assert_eq!(of("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(of("5m"), Some(Duration::from_millis(5)));
        assert_eq!(of("7n"), Some(Duration::from_nanos(7)));
    }

    #[test]
    fn what_is_no_timeout_is_none() {
        for text in ["", "S", "30", "-1S", "999999999S", "1.5S", "30s"] {
            assert_eq!(of(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_call_has_the_time_that_its_caller_gives_or_thirty_seconds() {
        let mut request = tonic::Request::new(());
        for seconds in [30, 60] {
            let earliest = Instant::now() + Duration::from_secs(seconds);
            let until = deadline(&request);
            assert!(until >= earliest && until < earliest + Duration::from_secs(5));
            request.set_timeout(Duration::from_secs(60));
        }
    }
}
