//! Suspected pods: kept in the snapshot, added last.

use std::time::Instant;

use inpod_types::PodUid;

use super::{Counts, Phase, Session, SessionInputs, Subject};
use crate::{
    message::Message,
    next_message::Action,
    peer::Ztunnel,
    quarantine::{Deferral, LostDuring},
};

impl Session {
    /// Defers an Add. The snapshot still names the pod, so that a ztunnel already serving the pod continues.
    pub(super) fn defer(&mut self, uid: PodUid) {
        if matches!(self.phase, Phase::Snapshot(_)) {
            self.keeps.insert(uid.clone());
        }
        self.deferred.insert(uid);
    }

    /// Queues the pods that another ztunnel has taken meanwhile: no longer suspected, even in the rest of a snapshot.
    pub(super) fn queue_cleared(&mut self, inputs: SessionInputs<'_>) {
        let ztunnel = &self.ztunnel;
        let cleared = |uid: &PodUid| inputs.quarantine.deferral(uid, ztunnel).is_none();
        for uid in self.deferred.extract_if(.., cleared) {
            self.queue.push(&uid);
        }
    }

    pub(super) fn next_deferred(
        &mut self,
        inputs: SessionInputs<'_>,
        now: Instant,
    ) -> Option<(Subject, Message)> {
        if !matches!(self.phase, Phase::Live) {
            return None;
        }
        while let Some(uid) = self.first_due(inputs, now) {
            self.deferred.remove(&uid);
            let wanted = inputs.desired.current(&uid);
            if self.decide(&uid, wanted, now) == Action::Add {
                return self.add(uid, wanted?);
            }
        }
        None
    }

    fn first_due(&self, inputs: SessionInputs<'_>, now: Instant) -> Option<PodUid> {
        let due = |uid: &&PodUid| self.deferral(uid, inputs).is_some_and(|it| it.due <= now);
        self.deferred.iter().find(due).cloned()
    }

    pub(super) fn deferral(&self, uid: &PodUid, inputs: SessionInputs<'_>) -> Option<Deferral> {
        inputs.quarantine.deferral(uid, &self.ztunnel)
    }

    /// The message was not sent, so its pod did not cause the end of the session.
    pub fn on_send_failed(&mut self) {
        self.in_flight = None;
    }

    pub fn ztunnel(&self) -> &Ztunnel {
        &self.ztunnel
    }

    pub(super) fn deferred_until(&self, inputs: SessionInputs<'_>) -> Option<Instant> {
        let due = |uid| self.deferral(uid, inputs).map_or(self.since, |it| it.due);
        self.deferred.iter().map(due).min()
    }

    /// The pod of the unanswered message.
    pub fn suspect(&self) -> Option<(&PodUid, LostDuring)> {
        match &self.in_flight.as_ref()?.subject {
            Subject::Add { uid, .. } => Some((uid, LostDuring::Add)),
            Subject::Keep(uid, _) => Some((uid, LostDuring::Keep)),
            Subject::Del(_, _) | Subject::SnapshotSent => None,
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn queued(&self) -> usize {
        self.queue.count() + self.keeps.len() + self.deferred.len()
    }

    pub fn serves(&self) -> usize {
        self.serves
    }
}
