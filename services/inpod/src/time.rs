use std::time::{Duration, SystemTime};

use prost_types::Timestamp;

/// Formats how long ago a time is; empty for an unset time.
pub(crate) fn age(at: Option<Timestamp>, now: SystemTime) -> String {
    let at = at.and_then(|at| SystemTime::try_from(at).ok());
    // After the clock was set back, recent times are in the future.
    at.map_or_else(String::new, |at| {
        span(now.duration_since(at).unwrap_or_default())
    })
}

/// Formats how far ahead a time is; empty for an unset time.
pub(crate) fn ahead(at: Option<Timestamp>, now: SystemTime) -> String {
    let at = at.and_then(|at| SystemTime::try_from(at).ok());
    at.map_or_else(String::new, |at| match at.duration_since(now) {
        Ok(left) if left >= Duration::from_secs(1) => format!("in {}", span(left)),
        Ok(_) | Err(_) => "now".to_owned(),
    })
}

/// Formats a duration in the two largest units.
fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        (_, _, _) => format!("{days}d{}h", hours % 24),
    }
}

pub(crate) fn took(time: Option<prost_types::Duration>) -> String {
    let time = time.and_then(|time| Duration::try_from(time).ok());
    time.map_or_else(String::new, |time| {
        if time >= Duration::from_secs(10) {
            span(time)
        } else {
            format!("{:.1}ms", time.as_secs_f64() * 1000.0)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_its_two_largest_units() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3_600, "1h0m"),
            (86_399, "23h59m"),
            (90_000, "1d1h"),
        ] {
            assert_eq!(span(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn what_is_not_said_is_empty_and_what_is_overdue_is_now() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        let at = |seconds| Some(Timestamp { seconds, nanos: 0 });
        assert_eq!(
            (age(None, now), ahead(None, now)),
            (String::new(), String::new())
        );
        assert_eq!(age(at(40), now), "1m0s");
        assert_eq!(age(at(140), now), "0s");
        assert_eq!(ahead(at(105), now), "in 5s");
        assert_eq!(ahead(at(99), now), "now");
        let millis = |nanos| Some(prost_types::Duration { seconds: 0, nanos });
        assert_eq!(took(millis(1_250_000)), "1.2ms");
    }
}
