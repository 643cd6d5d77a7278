//! Pods over which sessions ended: while a message about one waited for its answer, the ztunnel hung up, fell silent or
//! would not go on.
//!
//! Nobody knows whether the pod was the cause. After the first time it is told last, so that it holds up nobody; after
//! the second it is in quarantine, with growing waits. What is suspected is the pod, not its sandbox: a runtime that
//! makes a new sandbox for each attempt must not cost the node its ztunnel each time. A ztunnel that takes it, or says
//! properly that it cannot, clears it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use workload::PodUid;

/// How many sessions in a row a pod may cost before it is put in quarantine.
const TOLERATED: u32 = 1;

/// The first quarantine; each further one is twice as long, up to the longest. A wait keeps one pod out of the mesh, a
/// retry may cost the node its ztunnel.
const FIRST_QUARANTINE: Duration = Duration::from_secs(60);
const LONGEST_QUARANTINE: Duration = Duration::from_secs(3600);

/// What is held against a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// How many sessions in a row ended.
    pub times: u32,
    /// Why the last of them did, for people.
    pub cause: String,
    /// When it may be told again.
    pub due: Instant,
    during: Blamed,
}

impl Suspicion {
    /// Whether it may be named in a snapshot. Of a pod that was never added a Keep does nothing, so that only one over
    /// which a session ended is to be feared.
    pub fn may_keep(&self) -> bool {
        self.during != Blamed::Keep
    }

    /// Whether it is in quarantine, or being tried again after one.
    pub fn is_in_quarantine(&self) -> bool {
        self.times > TOLERATED
    }

    /// Until when it is not told, if that is so.
    pub fn quarantined_until(&self, now: Instant) -> Option<Instant> {
        (self.is_in_quarantine() && self.due > now).then_some(self.due)
    }
}

/// What was in flight when a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blamed {
    /// An Add.
    Add,
    /// A Keep.
    Keep,
}

/// All suspected pods.
#[derive(Debug, Default)]
pub struct Suspects(BTreeMap<PodUid, Suspicion>);

impl Suspects {
    /// A session ended over this pod. What nobody has been told of for long is forgotten.
    pub fn blame(&mut self, uid: &PodUid, during: Blamed, cause: &str, now: Instant) {
        self.0
            .retain(|_, suspicion| suspicion.due + LONGEST_QUARANTINE > now);
        let before = self.0.get(uid).map_or(0, |suspicion| suspicion.times);
        let suspicion = Suspicion {
            times: before.saturating_add(1),
            cause: cause.to_owned(),
            due: now + quarantine(before),
            during,
        };
        self.0.insert(uid.clone(), suspicion);
    }

    /// A ztunnel was told of this pod and goes on.
    pub fn clear(&mut self, uid: &PodUid) {
        self.0.remove(uid);
    }

    /// What is held against a pod.
    pub fn of(&self, uid: &PodUid) -> Option<&Suspicion> {
        self.0.get(uid)
    }

    /// How many pods are in quarantine.
    pub fn quarantined(&self) -> usize {
        let all = self.0.values();
        all.filter(|it| it.is_in_quarantine()).count()
    }
}

fn quarantine(times_before: u32) -> Duration {
    let Some(doublings) = times_before.checked_sub(TOLERATED) else {
        return Duration::ZERO;
    };
    let factor = 2_u32.saturating_pow(doublings);
    FIRST_QUARANTINE
        .saturating_mul(factor)
        .min(LONGEST_QUARANTINE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::uid;

    fn blamed(times: u32, now: Instant) -> Suspects {
        let mut suspects = Suspects::default();
        (0..times).for_each(|_| suspects.blame(&uid("p"), Blamed::Add, "it hung up", now));
        suspects
    }

    #[test]
    fn one_lost_session_delays_nothing_and_more_wait_ever_longer() {
        let now = Instant::now();
        let waits = [0, 60, 120, 240, 480, 960, 1920, 3600, 3600];
        for (times, seconds) in (1..).zip(waits) {
            let suspects = blamed(times, now);
            let suspicion = suspects.of(&uid("p")).unwrap();
            assert_eq!(suspicion.due, now + Duration::from_secs(seconds), "{times}");
            let quarantined = suspicion.quarantined_until(now).is_some();
            assert_eq!(quarantined, times > 1, "{times}");
        }
    }

    #[test]
    fn the_end_of_the_wait_ends_the_quarantine_and_not_the_suspicion() {
        let now = Instant::now();
        let suspects = blamed(2, now);
        let suspicion = suspects.of(&uid("p")).unwrap();
        let over = now + FIRST_QUARANTINE;
        assert_eq!(suspicion.quarantined_until(now), Some(over));
        assert_eq!(suspicion.quarantined_until(over), None);
        assert_eq!((suspicion.times, suspects.quarantined()), (2, 1));
    }

    #[test]
    fn only_a_keep_that_cost_a_session_is_not_repeated() {
        let now = Instant::now();
        let mut suspects = blamed(1, now);
        assert!(suspects.of(&uid("p")).unwrap().may_keep());
        suspects.blame(&uid("p"), Blamed::Keep, "it hung up", now);
        assert!(!suspects.of(&uid("p")).unwrap().may_keep());
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let now = Instant::now();
        let mut suspects = blamed(2, now);
        let later = now + FIRST_QUARANTINE + LONGEST_QUARANTINE;
        suspects.blame(&uid("q"), Blamed::Add, "it hung up", later);
        assert_eq!(suspects.of(&uid("p")), None);
        suspects.clear(&uid("q"));
        assert_eq!(suspects.of(&uid("q")), None);
    }
}
