//! The status of a workload's add in a session.

use std::time::Instant;

use inpod_types::PodUid;

use super::{Record, Session, Subject};
use crate::{
    nack::Nack,
    next_message::{PodState, Target},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddStatus {
    Added,
    /// Refused, and not retried for a while.
    Refused(Nack),
    Sent,
    Queued,
}

impl Session {
    pub fn add_status(&self, uid: &PodUid, wanted: &Target, now: Instant) -> AddStatus {
        match self.records.get(uid).map(|record| &record.state) {
            Some(PodState::Added(target)) if target == wanted => AddStatus::Added,
            Some(PodState::Refused(refusal))
                if refusal.target == *wanted && refusal.retry_at > now =>
            {
                AddStatus::Refused(refusal.nack.clone())
            }
            Some(_) | None if self.is_sent(uid) => AddStatus::Sent,
            Some(_) | None => AddStatus::Queued,
        }
    }

    pub fn record_of(&self, uid: &PodUid) -> Option<&Record> {
        self.records.get(uid)
    }

    /// Returns whether an Add or a Keep is in flight.
    pub fn is_sent(&self, uid: &PodUid) -> bool {
        match self.in_flight.as_ref().map(|in_flight| &in_flight.subject) {
            Some(Subject::Add { uid: sent, .. } | Subject::Keep(sent, _)) => sent == uid,
            Some(Subject::Del(_, _) | Subject::SnapshotSent) | None => false,
        }
    }
}
