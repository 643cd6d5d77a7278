//! Limits the rate of Events per pod and reason, and per node.

use std::{collections::HashMap, time::Duration};

use inpod_types::Reason;
use tokio::time::Instant;

/// The size of a token bucket, and the interval at which the bucket gains a token.
type Rate = (u32, Duration);

const PER_POD: Rate = (3, Duration::from_secs(300));

const PER_NODE: Rate = (50, Duration::from_millis(100));

/// The buckets, each as the time at which the bucket is full.
#[derive(Debug, Default)]
pub(super) struct RateLimits {
    node: Option<Instant>,
    pods: HashMap<(String, Reason), Instant>,
}

impl RateLimits {
    /// Returns whether the Event may be sent, and takes a token for the Event.
    pub(super) fn allow(&mut self, uid: &str, reason: Reason, now: Instant) -> bool {
        // A full bucket equals a new bucket.
        self.pods.retain(|_, full_at| *full_at > now);
        let key = (uid.to_owned(), reason);
        let pod_bucket = take_token(PER_POD, self.pods.get(&key).copied(), now);
        let node_bucket = take_token(PER_NODE, self.node, now);
        let (Some(pod_bucket), Some(_)) = (pod_bucket, node_bucket) else {
            return false;
        };
        self.pods.insert(key, pod_bucket);
        self.node = node_bucket;
        true
    }
}

/// Returns the bucket without the token, or `None` if the bucket is empty.
fn take_token(rate: Rate, full_at: Option<Instant>, now: Instant) -> Option<Instant> {
    let (size, interval) = rate;
    let full_at = full_at.map_or(now, |at| at.max(now)) + interval;
    (full_at <= now + interval * size).then_some(full_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_allowed(limits: &mut RateLimits, pods: &[&str], now: Instant) -> usize {
        let pods = pods.iter();
        pods.filter(|pod| limits.allow(pod, Reason::ZtunnelRefused, now))
            .count()
    }

    #[test]
    fn a_pod_sends_three_events_per_reason_and_one_per_five_minutes() {
        let (mut limits, start) = (RateLimits::default(), Instant::now());
        for (seconds, allowed) in [(0, 3), (299, 0), (300, 1), (599, 0), (900, 2)] {
            let now = start + Duration::from_secs(seconds);
            let count = count_allowed(&mut limits, &["web"; 10], now);
            assert_eq!(count, allowed, "{seconds}");
        }
        let (web, now) = ("web", start + Duration::from_secs(900));
        assert!(limits.allow(web, Reason::AnnotationLate, now));
    }

    #[test]
    fn a_node_sends_fifty_events_at_once_and_ten_a_second() {
        let (mut limits, start) = (RateLimits::default(), Instant::now());
        for (seconds, allowed) in [(0, 50), (1, 10), (2000, 50)] {
            let pods: Vec<_> = (0..100)
                .map(|number| format!("{seconds}-{number}"))
                .collect();
            let pods: Vec<_> = pods.iter().map(String::as_str).collect();
            let now = start + Duration::from_secs(seconds);
            assert_eq!(count_allowed(&mut limits, &pods, now), allowed);
        }
        assert_eq!(limits.pods.len(), 50, "full buckets are forgotten");
    }
}
