//! Suspected pods: ztunnel disconnected, fell silent or gave up while a message about the pod was unanswered.
//!
//! The pod may not be the cause. After the first loss, the pod is sent last, to delay no other pod; after the second
//! loss, the pod is in quarantine, with growing waits. The suspicion concerns the pod and not the sandbox: a runtime
//! that creates a new sandbox for each attempt must not cost the node its ztunnel each time. Suspicions are per
//! ztunnel: a broken ztunnel loses its sessions over every pod, and its successor must not pay for the losses. A
//! ztunnel that accepts a pod, or refuses the pod and keeps the connection, clears the suspicion.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use inpod_types::PodUid;

use crate::peer::Ztunnel;

/// Consecutive losses that do not yet put a pod in quarantine.
const TOLERATED_LOSSES: u32 = 1;

/// Each quarantine is twice as long as the previous quarantine, up to the maximum. A wait keeps a single pod out of the
/// mesh; a retry may cost the node its ztunnel.
const INITIAL_QUARANTINE: Duration = Duration::from_secs(60);
const MAX_QUARANTINE: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// The number of consecutive lost sessions.
    pub times: u32,
    pub cause: String,
    pub due: Instant,
    at: Instant,
    during: LostDuring,
}

impl Suspicion {
    /// Returns whether a snapshot may name the pod. A Keep of a pod that was never added does nothing, so only a Keep
    /// over which sessions ended is dangerous. After the first loss, the Keep is still sent: leaving the pod out would
    /// certainly stop the pod.
    fn may_keep(&self) -> bool {
        self.during != LostDuring::Keep || !self.is_in_quarantine()
    }

    /// Returns whether the pod was put in quarantine. The result stays true while the pod is retried after the
    /// quarantine.
    pub fn is_in_quarantine(&self) -> bool {
        self.times > TOLERATED_LOSSES
    }

    /// Returns the end of the quarantine; `None` after the end or without a quarantine.
    pub fn quarantined_until(&self, now: Instant) -> Option<Instant> {
        (self.is_in_quarantine() && self.due > now).then_some(self.due)
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
    pub may_keep: bool,
}

/// Suspected pods, each with the ztunnels that lost sessions over the pod.
#[derive(Debug, Default)]
pub struct Quarantine(BTreeMap<PodUid, BTreeMap<Ztunnel, Suspicion>>);

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
        self.expire(now);
        let by = self.0.entry(uid.clone()).or_default();
        let before = by.get(ztunnel).map_or(0, |suspicion| suspicion.times);
        let suspicion = Suspicion {
            times: before.saturating_add(1),
            cause: cause.to_owned(),
            due: now + quarantine_duration(before),
            at: now,
            during,
        };
        by.insert(ztunnel.clone(), suspicion);
    }

    fn expire(&mut self, now: Instant) {
        self.0.retain(|_, by| {
            by.retain(|_, suspicion| suspicion.due + MAX_QUARANTINE > now);
            !by.is_empty()
        });
    }

    /// Clears the suspicions against a pod after an answer that did not end the session. Returns whether there were
    /// any.
    pub fn clear(&mut self, uid: &PodUid) -> bool {
        self.0.remove(uid).is_some()
    }

    /// Returns how to send a pod to the given ztunnel; `None` if the pod is not suspected. A suspicion of another
    /// ztunnel causes no wait, because the other ztunnel may be broken.
    pub fn deferral(&self, uid: &PodUid, ztunnel: &Ztunnel) -> Option<Deferral> {
        let by = self.0.get(uid)?;
        let other = |suspicion: &Suspicion| Deferral {
            due: suspicion.at,
            may_keep: true,
        };
        let own = |suspicion: &Suspicion| Deferral {
            due: suspicion.due,
            may_keep: suspicion.may_keep(),
        };
        let deferral = by.get(ztunnel).map(own);
        deferral.or_else(|| by.values().next().map(other))
    }

    pub fn suspicion(&self, uid: &PodUid, ztunnel: &Ztunnel) -> Option<&Suspicion> {
        self.0.get(uid)?.get(ztunnel)
    }

    /// Returns the suspicion with the most lost sessions.
    pub fn worst_suspicion(&self, uid: &PodUid) -> Option<&Suspicion> {
        let by = self.0.get(uid)?;
        by.values().max_by_key(|suspicion| suspicion.times)
    }
}

fn quarantine_duration(times_before: u32) -> Duration {
    let Some(doublings) = times_before.checked_sub(TOLERATED_LOSSES) else {
        return Duration::ZERO;
    };
    let factor = 2_u32.saturating_pow(doublings);
    INITIAL_QUARANTINE
        .saturating_mul(factor)
        .min(MAX_QUARANTINE)
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
    fn one_lost_session_delays_nothing_and_more_wait_ever_longer() {
        let now = Instant::now();
        let waits = [0, 60, 120, 240, 480, 960, 1920, 3600, 3600];
        for (times, seconds) in (1..).zip(waits) {
            let quarantine = with_losses(times, LostDuring::Add, now);
            let suspicion = quarantine.suspicion(&uid("p"), &ONE).unwrap();
            assert_eq!(suspicion.due, now + Duration::from_secs(seconds), "{times}");
            let quarantined = suspicion.quarantined_until(now).is_some();
            assert_eq!(quarantined, times > 1, "{times}");
        }
    }

    #[test]
    fn the_end_of_the_wait_ends_the_quarantine_and_not_the_suspicion() {
        let now = Instant::now();
        let quarantine = with_losses(2, LostDuring::Add, now);
        let suspicion = quarantine.worst_suspicion(&uid("p")).unwrap();
        let over = now + INITIAL_QUARANTINE;
        assert_eq!(suspicion.quarantined_until(now), Some(over));
        assert_eq!(suspicion.quarantined_until(over), None);
        assert_eq!(suspicion.times, 2);
    }

    #[test]
    fn another_ztunnel_receives_it_last_and_without_a_wait() {
        let now = Instant::now();
        let mut quarantine = with_losses(5, LostDuring::Keep, now);
        let own = quarantine.deferral(&uid("p"), &ONE).unwrap();
        assert!(own.due > now && !own.may_keep);
        let other = quarantine.deferral(&uid("p"), &OTHER).unwrap();
        assert!(other.due <= now && other.may_keep);
        quarantine.record_loss(
            &uid("p"),
            &OTHER,
            LostDuring::Add,
            "it closed the connection",
            now,
        );
        let own = quarantine.deferral(&uid("p"), &ONE).unwrap();
        assert!(own.due > now, "each has its own");
        assert_eq!(quarantine.worst_suspicion(&uid("p")).unwrap().times, 5);
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
        let later = now + INITIAL_QUARANTINE + MAX_QUARANTINE;
        quarantine.record_loss(
            &uid("q"),
            &ONE,
            LostDuring::Add,
            "it closed the connection",
            later,
        );
        assert_eq!(quarantine.worst_suspicion(&uid("p")), None);
        assert!(quarantine.clear(&uid("q")));
        assert!(!quarantine.clear(&uid("q")));
    }
}
