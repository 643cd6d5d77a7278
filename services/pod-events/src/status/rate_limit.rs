//! Limits the rate of Events per pod and reason, and per node.

use std::{collections::HashMap, time::Duration};

use inpod_types::{PodUid, Reason};
use tokio::time::Instant;

const PER_POD: Rate = Rate {
    burst: 3,
    interval: Duration::from_secs(300),
};

const PER_NODE: Rate = Rate {
    burst: 50,
    interval: Duration::from_millis(100),
};

/// Above this number, full buckets are evicted, because a full bucket equals a new bucket.
const MAX_TRACKED: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    interval: Duration,
}

/// A token bucket, represented by the time at which the bucket was or would have been empty. For a full bucket, the
/// time is at least [`Rate::refill_time`] ago.
#[derive(Clone, Copy, Debug)]
struct Bucket(Instant);

impl Rate {
    fn refill_time(self) -> Duration {
        self.interval.saturating_mul(self.burst)
    }
}

impl Bucket {
    fn full(rate: Rate, now: Instant) -> Self {
        // `Instant` cannot precede the boot: soon after the boot, the bucket is only as full as the clock is old.
        Self(now.checked_sub(rate.refill_time()).unwrap_or(now))
    }

    fn is_full(self, rate: Rate, now: Instant) -> bool {
        now.saturating_duration_since(self.0) >= rate.refill_time()
    }

    /// Returns `None` if the bucket is empty.
    fn take(self, rate: Rate, now: Instant) -> Option<Self> {
        let full = Self::full(rate, now);
        let taken = Self(self.0.max(full.0) + rate.interval);
        (taken.0 <= now).then_some(taken)
    }
}

#[derive(Debug, Default)]
pub(super) struct RateLimits {
    node: Option<Bucket>,
    pods: HashMap<(PodUid, Reason), Bucket>,
}

impl RateLimits {
    /// Returns whether the Event may be sent, and takes a token for the Event.
    pub(super) fn allow(&mut self, pod: &PodUid, reason: Reason, now: Instant) -> bool {
        let key = (pod.clone(), reason);
        let known = self.pods.get(&key).copied();
        let pod_bucket = known.unwrap_or_else(|| Bucket::full(PER_POD, now));
        let node_bucket = self.node.unwrap_or_else(|| Bucket::full(PER_NODE, now));
        let (Some(pod_bucket), Some(node_bucket)) = (
            pod_bucket.take(PER_POD, now),
            node_bucket.take(PER_NODE, now),
        ) else {
            return false;
        };
        if self.pods.len() >= MAX_TRACKED {
            self.pods.retain(|_, bucket| !bucket.is_full(PER_POD, now));
        }
        self.pods.insert(key, pod_bucket);
        self.node = Some(node_bucket);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(limits: &mut RateLimits, pod: &str, now: Instant) -> bool {
        limits.allow(&pod.parse().unwrap(), Reason::ZtunnelRefused, now)
    }

    /// Returns a time far enough from the boot for full buckets.
    fn later() -> Instant {
        Instant::now() + Duration::from_secs(100_000)
    }

    #[test]
    fn a_pod_sends_three_events_of_a_reason_and_one_more_every_five_minutes() {
        let (mut limits, mut now) = (RateLimits::default(), later());
        let allowed_count = (0..10).filter(|_| allowed(&mut limits, "web", now)).count();
        assert_eq!(allowed_count, 3);
        let other = limits.allow(&"web".parse().unwrap(), Reason::AnnotationLate, now);
        assert!(other, "another reason");
        now += Duration::from_secs(299);
        assert!(!allowed(&mut limits, "web", now));
        now += Duration::from_secs(1);
        assert!(allowed(&mut limits, "web", now) && !allowed(&mut limits, "web", now));
    }

    #[test]
    fn a_node_sends_fifty_events_at_once_and_ten_a_second() {
        let (mut limits, mut now) = (RateLimits::default(), later());
        let mut allowed_count = |round: &str, now| {
            let pods = (0..100).map(|number| format!("web-{round}-{number}"));
            pods.filter(|pod| allowed(&mut limits, pod, now)).count()
        };
        assert_eq!(allowed_count("first", now), 50);
        now += Duration::from_secs(1);
        assert_eq!(allowed_count("second", now), 10);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut limits, mut now) = (RateLimits::default(), later());
        for number in 0..3 * MAX_TRACKED {
            now += Duration::from_secs(2);
            assert!(allowed(&mut limits, &format!("web-{number}"), now));
        }
        assert!(limits.pods.len() <= MAX_TRACKED, "{}", limits.pods.len());
    }
}
