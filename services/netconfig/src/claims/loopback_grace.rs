//! Withholds the state of a netns whose `lo` went down, because runtimes set `lo` down shortly before they call DEL.

use std::time::{Duration, Instant};

/// Limits how long a state is withheld. containerd calls DEL of inpod's plugin some 100 ms after the plugin `loopback`
/// has set `lo` down, and a loaded node may take some seconds.
const LOOPBACK_GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct LoopbackGrace(Option<Instant>);

impl LoopbackGrace {
    /// Returns how much of the grace period is left. The period begins with the first state that lacks what the kernel
    /// drops while `lo` is down, and each other state ends it.
    pub(super) fn remaining(&mut self, lacks_loopback: bool, now: Instant) -> Option<Duration> {
        if !lacks_loopback {
            self.0 = None;
            return None;
        }
        let end = *self.0.get_or_insert(now + LOOPBACK_GRACE);
        Some(end.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grace_period_of_lo_ends_with_its_time_or_another_state() {
        let (start, mut grace) = (Instant::now(), LoopbackGrace::default());
        let mut left_at = |seconds, lacks_loopback| {
            let now = start + Duration::from_secs(seconds);
            let left = grace.remaining(lacks_loopback, now);
            left.map(|left| left.as_secs())
        };
        assert_eq!(left_at(0, false), None);
        assert_eq!(left_at(1, true), Some(5));
        assert_eq!(left_at(3, true), Some(3));
        assert_eq!(left_at(6, true), None, "`lo` stays down");
        assert_eq!(left_at(7, true), None);
        assert_eq!(left_at(8, false), None, "the routes are back");
        assert_eq!(left_at(9, true), Some(5));
    }
}
