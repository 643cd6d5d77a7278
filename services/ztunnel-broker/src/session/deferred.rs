//! Pods over which sessions ended: kept in the snapshot, added last.

use std::time::Instant;

use inpod_types::PodUid;

use super::{Counts, Known, Phase, Session, Subject};
use crate::{
    message::Message,
    peer::Ztunnel,
    step::Step,
    suspects::{Blamed, Treatment},
};

impl Session {
    /// Its Add comes last; a snapshot names it all the same, so that a ztunnel that serves it goes on.
    pub(super) fn defer(&mut self, uid: PodUid) {
        if matches!(self.phase, Phase::Snapshot(_)) {
            self.keeps.insert(uid.clone());
        }
        self.deferred.insert(uid);
    }

    /// Another ztunnel has taken them meanwhile: they are pods like any other, also in what is left of a snapshot.
    pub(super) fn queue_cleared(&mut self, known: Known<'_>) {
        let ztunnel = &self.ztunnel;
        let cleared = |uid: &PodUid| known.suspects.treatment(uid, ztunnel).is_none();
        for uid in self.deferred.extract_if(.., cleared) {
            self.queue.push_later(&uid);
        }
    }

    pub(super) fn next_deferred(
        &mut self,
        known: Known<'_>,
        now: Instant,
    ) -> Option<(Subject, Message)> {
        if !matches!(self.phase, Phase::Live) {
            return None;
        }
        while let Some(uid) = self.first_due(known, now) {
            self.deferred.remove(&uid);
            let wanted = known.desired.current(&uid);
            if self.step(&uid, wanted, now) == Step::Add {
                return self.add(uid, wanted?);
            }
        }
        None
    }

    fn first_due(&self, known: Known<'_>, now: Instant) -> Option<PodUid> {
        let due = |uid: &&PodUid| self.treatment(uid, known).is_some_and(|it| it.due <= now);
        self.deferred.iter().find(due).cloned()
    }

    pub(super) fn treatment(&self, uid: &PodUid, known: Known<'_>) -> Option<Treatment> {
        known.suspects.treatment(uid, &self.ztunnel)
    }

    /// The message that was last to be sent did not leave: nobody is to blame for the end that follows.
    pub fn unsent(&mut self) {
        self.in_flight = None;
    }

    /// Which ztunnel it is.
    pub fn ztunnel(&self) -> &Ztunnel {
        &self.ztunnel
    }

    /// When the first of them is due.
    pub(super) fn deferred_until(&self, known: Known<'_>) -> Option<Instant> {
        let due = |uid| self.treatment(uid, known).map_or(self.since, |it| it.due);
        self.deferred.iter().map(due).min()
    }

    /// The pod that an unanswered message is about, when the session has ended over it and not by our own will.
    pub fn blamed(&self) -> Option<(&PodUid, Blamed)> {
        match &self.in_flight.as_ref()?.subject {
            _ if self.renewed => None,
            Subject::Add { uid, .. } => Some((uid, Blamed::Add)),
            Subject::Keep(uid, _) => Some((uid, Blamed::Keep)),
            Subject::Del(_, _) | Subject::SnapshotSent => None,
        }
    }

    /// What it has said so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many pods it is still to be looked at for.
    pub fn queued(&self) -> usize {
        self.queue.len() + self.keeps.len() + self.deferred.len()
    }

    /// How many pods it serves by its own word.
    pub fn serves(&self) -> usize {
        self.serves
    }

    /// Whether it has just been told the last that it was owed; once.
    pub fn became_idle(&mut self) -> bool {
        let live = matches!(self.phase, Phase::Live);
        let idle = live && self.in_flight.is_none() && self.queue.is_empty();
        idle && std::mem::take(&mut self.busy)
    }
}
