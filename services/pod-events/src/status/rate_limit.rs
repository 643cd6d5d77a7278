//! Limits the rate of Events per pod and reason, and per node.

use std::{collections::HashMap, time::Duration};

use inpod_service::TokenBucket;
use inpod_types::Reason;
use tokio::time::Instant;

const PER_POD: TokenBucket = TokenBucket::new(3, Duration::from_secs(300));

const PER_NODE: TokenBucket = TokenBucket::new(50, Duration::from_millis(100));

#[derive(Debug, Default)]
pub(super) struct RateLimits {
    /// `None` before the first Event.
    node: Option<TokenBucket>,
    pods: HashMap<(String, Reason), TokenBucket>,
}

impl RateLimits {
    /// Returns whether the Event may be sent, and takes a token for the Event.
    pub(super) fn allow(&mut self, uid: &str, reason: Reason, now: Instant) -> bool {
        // A full bucket equals a new bucket.
        self.pods.retain(|_, bucket| !bucket.is_full(now));
        let key = (uid.to_owned(), reason);
        let mut pod = self.pods.get(&key).copied().unwrap_or(PER_POD);
        let mut node = self.node.unwrap_or(PER_NODE);
        let is_allowed = pod.try_take(now) && node.try_take(now);
        if is_allowed {
            self.pods.insert(key, pod);
            self.node = Some(node);
        }
        is_allowed
    }
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
