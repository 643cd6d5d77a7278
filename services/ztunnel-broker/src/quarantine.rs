//! Pods over which sessions ended: while a message about one waited for its answer, the ztunnel hung up, fell silent or
//! would not go on.
//!
//! Nobody knows whether the pod was the cause. After the first time it is told last, so that it holds up nobody; after
//! the second it is in quarantine, with growing waits. What is suspected is the pod, not its sandbox: a runtime that
//! makes a new sandbox for each attempt must not cost the node its ztunnel each time. Each ztunnel has suspects of its
//! own: one that is broken loses its sessions over every pod, and its successor must not pay for that. A ztunnel that
//! takes a pod, or says properly that it cannot, clears it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use inpod_types::PodUid;

use crate::peer::Ztunnel;

/// How many sessions in a row a pod may cost before it is put in quarantine.
const TOLERATED_LOSSES: u32 = 1;

/// The first quarantine; each further one is twice as long, up to the longest. A wait keeps one pod out of the mesh, a
/// retry may cost the node its ztunnel.
const INITIAL_QUARANTINE: Duration = Duration::from_secs(60);
const MAX_QUARANTINE: Duration = Duration::from_secs(3600);

/// What is held against a pod by one ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// How many sessions in a row ended.
    pub times: u32,
    /// Why the last of them did, for people.
    pub cause: String,
    /// When it may be told again.
    pub due: Instant,
    at: Instant,
    during: LostDuring,
}

impl Suspicion {
    /// Whether it may be named in a snapshot. Of a pod that was never added a Keep does nothing, so that only one over
    /// which sessions ended is to be feared; after the first, leaving it out would cut it for certain.
    fn may_keep(&self) -> bool {
        self.during != LostDuring::Keep || !self.is_in_quarantine()
    }

    /// Whether it is in quarantine, or being tried again after one.
    pub fn is_in_quarantine(&self) -> bool {
        self.times > TOLERATED_LOSSES
    }

    /// Until when it is not told, if that is so.
    pub fn quarantined_until(&self, now: Instant) -> Option<Instant> {
        (self.is_in_quarantine() && self.due > now).then_some(self.due)
    }
}

/// What was in flight when a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostDuring {
    /// An Add.
    Add,
    /// A Keep.
    Keep,
}

/// How a ztunnel is told of a suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deferral {
    /// When its Add is due, after everything else.
    pub due: Instant,
    /// Whether its snapshot may name it.
    pub may_keep: bool,
}

/// All suspected pods, each with the ztunnels that lost sessions over it.
#[derive(Debug, Default)]
pub struct Quarantine(BTreeMap<PodUid, BTreeMap<Ztunnel, Suspicion>>);

impl Quarantine {
    /// A session of that ztunnel ended over this pod. What nobody has been told of for long is forgotten.
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

    /// A ztunnel was told of this pod and goes on. Returns whether anything was held against it.
    pub fn clear(&mut self, uid: &PodUid) -> bool {
        self.0.remove(uid).is_some()
    }

    /// How that ztunnel is told of a pod; `None` for one that is not suspected. Over what another ztunnel lost its
    /// sessions this one does not wait: the other may be the broken one.
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

    /// What a ztunnel holds against a pod.
    pub fn suspicion(&self, uid: &PodUid, ztunnel: &Ztunnel) -> Option<&Suspicion> {
        self.0.get(uid)?.get(ztunnel)
    }

    /// The worst that is held against a pod.
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
    fn another_ztunnel_is_told_last_and_at_once() {
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
