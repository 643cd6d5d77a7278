//! Suspected pods: ztunnel disconnected, fell silent or gave up while a message about the pod was unanswered.
//!
//! The pod may not be the cause. After the first loss, the pod is sent last, to delay no other pod; after the second
//! loss, the pod is in quarantine, with growing waits. The suspicion concerns the pod and not the sandbox: a runtime
//! that creates a new sandbox for each attempt must not cost the node its ztunnel each time. A ztunnel without lost
//! sessions receives the pod last and without a wait: the other ztunnel may be broken. A ztunnel that accepts a pod, or
//! refuses the pod and keeps the connection, clears the suspicion.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use inpod_types::{Backoff, PodUid};

use crate::peer::Ztunnel;

/// Consecutive losses that do not yet put a pod in quarantine.
const TOLERATED_LOSSES: u32 = 1;

/// The lengths of the quarantines. A wait keeps a single pod out of the mesh; a retry may cost the node its ztunnel.
const QUARANTINE: Backoff = Backoff::new(Duration::from_secs(60), Duration::from_secs(3600));

/// A node has one ztunnel, or two during an upgrade.
const MAX_ZTUNNELS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// The number of consecutive lost sessions.
    pub times: u32,
    pub cause: String,
    pub due: Instant,
    at: Instant,
    during: LostDuring,
    /// The ztunnels that lost sessions over the pod.
    by: BTreeSet<Ztunnel>,
}

impl Suspicion {
    /// Returns whether the pod was put in quarantine. The result stays true while the pod is retried after the
    /// quarantine.
    pub fn is_in_quarantine(&self) -> bool {
        self.times > TOLERATED_LOSSES
    }
}

/// The unanswered message when a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostDuring {
    Add,
    Keep,
}

/// The conditions under which a ztunnel receives a suspected pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deferral {
    /// The time when the pod's Add is sent, after everything else.
    pub due: Instant,
    /// False if a snapshot must not name the pod. A Keep of a pod that was never added does nothing, so only a Keep over
    /// which sessions ended is dangerous. After the first loss, the Keep is still sent: leaving the pod out would
    /// certainly stop the pod.
    pub may_keep: bool,
}

#[derive(Debug, Default)]
pub struct Quarantine(BTreeMap<PodUid, Suspicion>);

impl Quarantine {
    /// Records a session's end over the pod. Drops suspicions that have been due for long.
    pub fn record_loss(
        &mut self,
        uid: &PodUid,
        ztunnel: &Ztunnel,
        during: LostDuring,
        cause: &str,
        now: Instant,
    ) {
        self.0.retain(|_, it| it.due + QUARANTINE.longest > now);
        let earlier = self.0.remove(uid).map(|it| (it.times, it.by));
        let (before, mut by) = earlier.unwrap_or_default();
        // Without pods, each ztunnel that crashes over the pod comes back as another process.
        if by.len() >= MAX_ZTUNNELS {
            by.pop_first();
        }
        by.insert(ztunnel.clone());
        let suspicion = Suspicion {
            times: before.saturating_add(1),
            cause: cause.to_owned(),
            due: now + quarantine_duration(before),
            at: now,
            during,
            by,
        };
        self.0.insert(uid.clone(), suspicion);
    }

    /// Clears the suspicion against a pod after an answer that did not end the session. Returns whether there was one.
    pub fn clear(&mut self, uid: &PodUid) -> bool {
        self.0.remove(uid).is_some()
    }

    pub fn suspicion(&self, uid: &PodUid) -> Option<&Suspicion> {
        self.0.get(uid)
    }

    /// Returns how to send a pod to the given ztunnel; `None` if the pod is not suspected.
    pub fn deferral(&self, uid: &PodUid, ztunnel: &Ztunnel) -> Option<Deferral> {
        self.0.get(uid).map(|it| {
            let is_own = it.by.contains(ztunnel);
            let is_dangerous = it.during == LostDuring::Keep && it.is_in_quarantine();
            Deferral {
                due: if is_own { it.due } else { it.at },
                may_keep: !(is_own && is_dangerous),
            }
        })
    }

    /// Returns the end of a pod's quarantine in the given ztunnel; `None` after the end or without a quarantine.
    pub fn quarantined_until(
        &self,
        uid: &PodUid,
        ztunnel: &Ztunnel,
        now: Instant,
    ) -> Option<Instant> {
        let suspicion = self.0.get(uid)?;
        let applies = suspicion.is_in_quarantine() && suspicion.by.contains(ztunnel);
        (applies && suspicion.due > now).then_some(suspicion.due)
    }

    /// Returns the next time after `now` when a suspected pod is due.
    pub fn next_due(&self, now: Instant) -> Option<Instant> {
        self.0
            .values()
            .map(|it| it.due)
            .filter(|due| *due > now)
            .min()
    }
}

fn quarantine_duration(times_before: u32) -> Duration {
    let quarantines = times_before.checked_sub(TOLERATED_LOSSES);
    quarantines.map_or(Duration::ZERO, |before| QUARANTINE.delay(before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::uid;

    const ONE: Ztunnel = Ztunnel::Process(1);
    const OTHER: Ztunnel = Ztunnel::Process(2);

    fn with_losses(times: u32, during: LostDuring, now: Instant) -> Quarantine {
        let mut quarantine = Quarantine::default();
        for _ in 0..times {
            quarantine.record_loss(&uid("p"), &ONE, during, "it closed the connection", now);
        }
        quarantine
    }

    #[test]
    fn each_quarantine_is_twice_as_long_and_leaves_the_suspicion() {
        let now = Instant::now();
        for (times, seconds) in [(1, 0), (2, 60), (3, 120), (4, 240), (7, 1920), (9, 3600)] {
            let quarantine = with_losses(times, LostDuring::Add, now);
            let over = now + Duration::from_secs(seconds);
            assert_eq!(quarantine.deferral(&uid("p"), &ONE).unwrap().due, over);
            let until = quarantine.quarantined_until(&uid("p"), &ONE, now);
            assert_eq!(until, (times > 1).then_some(over), "{times}");
            assert_eq!(quarantine.quarantined_until(&uid("p"), &ONE, over), None);
            assert_eq!(quarantine.suspicion(&uid("p")).unwrap().times, times);
        }
    }

    #[test]
    fn another_ztunnel_waits_only_after_it_lost_a_session_too() {
        let now = Instant::now();
        let mut quarantine = with_losses(5, LostDuring::Keep, now);
        let own = quarantine.deferral(&uid("p"), &ONE).unwrap();
        assert!(own.due > now && !own.may_keep);
        let other = quarantine.deferral(&uid("p"), &OTHER).unwrap();
        assert!(other.due <= now && other.may_keep);
        quarantine.record_loss(&uid("p"), &OTHER, LostDuring::Add, "it crashed", now);
        for ztunnel in [ONE, OTHER] {
            let deferral = quarantine.deferral(&uid("p"), &ztunnel).unwrap();
            assert!(deferral.due > now && deferral.may_keep, "{ztunnel:?}");
        }
    }

    #[test]
    fn only_a_keep_that_cost_two_sessions_is_not_repeated() {
        let now = Instant::now();
        for (times, during, may_keep) in [
            (1, LostDuring::Keep, true),
            (2, LostDuring::Keep, false),
            (2, LostDuring::Add, true),
        ] {
            let quarantine = with_losses(times, during, now);
            let deferral = quarantine.deferral(&uid("p"), &ONE).unwrap();
            assert_eq!(deferral.may_keep, may_keep, "{times} {during:?}");
        }
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let now = Instant::now();
        let mut quarantine = with_losses(2, LostDuring::Add, now);
        let later = now + QUARANTINE.first + QUARANTINE.longest;
        quarantine.record_loss(&uid("q"), &ONE, LostDuring::Add, "it crashed", later);
        assert_eq!(quarantine.suspicion(&uid("p")), None);
        assert!(quarantine.clear(&uid("q")));
        assert!(!quarantine.clear(&uid("q")));
    }
}
