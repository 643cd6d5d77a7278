//! How many Events are told: few of one kind of one pod, and not too many of a node.

use std::{collections::HashMap, time::Duration};

use inpod_types::{PodUid, Reason};
use tokio::time::Instant;

/// Of one pod and reason: so many at once, and one more for each of these times.
const OF_POD: Rate = Rate {
    burst: 3,
    every: Duration::from_secs(300),
};

/// Of all pods of the node.
const OF_NODE: Rate = Rate {
    burst: 50,
    every: Duration::from_millis(100),
};

/// How many pods and reasons are remembered before those are forgotten that may tell as much as any.
const REMEMBERED: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    every: Duration,
}

/// A token bucket, as the time at which it was empty or would have been: a full one is far enough in the past.
#[derive(Clone, Copy, Debug)]
struct Bucket(Instant);

impl Rate {
    fn whole(self) -> Duration {
        self.every.saturating_mul(self.burst)
    }
}

impl Bucket {
    fn full(rate: Rate, now: Instant) -> Self {
        // A clock that began less than this ago: then the bucket is as full as the clock is old.
        Self(now.checked_sub(rate.whole()).unwrap_or(now))
    }

    fn is_full(self, rate: Rate, now: Instant) -> bool {
        now.saturating_duration_since(self.0) >= rate.whole()
    }

    /// The bucket after one is taken; `None` where there is none.
    fn take(self, rate: Rate, now: Instant) -> Option<Self> {
        let full = Self::full(rate, now);
        let taken = Self(self.0.max(full.0) + rate.every);
        (taken.0 <= now).then_some(taken)
    }
}

/// What may be told.
#[derive(Debug, Default)]
pub(super) struct Limits {
    node: Option<Bucket>,
    pods: HashMap<(PodUid, Reason), Bucket>,
}

impl Limits {
    /// Whether one more Event may be told, which counts as told then.
    pub(super) fn allow(&mut self, pod: &PodUid, reason: Reason, now: Instant) -> bool {
        let key = (pod.clone(), reason);
        let known = self.pods.get(&key).copied();
        let of_pod = known.unwrap_or_else(|| Bucket::full(OF_POD, now));
        let of_node = self.node.unwrap_or_else(|| Bucket::full(OF_NODE, now));
        let (Some(of_pod), Some(of_node)) = (of_pod.take(OF_POD, now), of_node.take(OF_NODE, now))
        else {
            return false;
        };
        if self.pods.len() >= REMEMBERED {
            self.pods.retain(|_, bucket| !bucket.is_full(OF_POD, now));
        }
        self.pods.insert(key, of_pod);
        self.node = Some(of_node);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(limits: &mut Limits, pod: &str, now: Instant) -> bool {
        limits.allow(&pod.parse().unwrap(), Reason::ZtunnelRefused, now)
    }

    /// A clock that has run for long.
    fn later() -> Instant {
        Instant::now() + Duration::from_secs(100_000)
    }

    #[test]
    fn a_pod_tells_three_of_a_reason_and_one_more_every_five_minutes() {
        let (mut limits, mut now) = (Limits::default(), later());
        let told = (0..10).filter(|_| allowed(&mut limits, "web", now)).count();
        assert_eq!(told, 3);
        let other = limits.allow(&"web".parse().unwrap(), Reason::AnnotationLate, now);
        assert!(other, "another reason");
        now += Duration::from_secs(299);
        assert!(!allowed(&mut limits, "web", now));
        now += Duration::from_secs(1);
        assert!(allowed(&mut limits, "web", now) && !allowed(&mut limits, "web", now));
    }

    #[test]
    fn a_node_tells_fifty_at_once_and_ten_a_second() {
        let (mut limits, mut now) = (Limits::default(), later());
        let mut told = |round: &str, now| {
            let pods = (0..100).map(|number| format!("web-{round}-{number}"));
            pods.filter(|pod| allowed(&mut limits, pod, now)).count()
        };
        assert_eq!(told("first", now), 50);
        now += Duration::from_secs(1);
        assert_eq!(told("second", now), 10);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut limits, mut now) = (Limits::default(), later());
        for number in 0..3 * REMEMBERED {
            now += Duration::from_secs(2);
            assert!(allowed(&mut limits, &format!("web-{number}"), now));
        }
        assert!(limits.pods.len() <= REMEMBERED, "{}", limits.pods.len());
    }
}
