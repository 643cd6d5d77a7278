//! The state of each pod according to a ztunnel's acknowledgements.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use inpod_types::PodUid;

use crate::next_message::PodState;

/// The state of a pod since the last answer.
#[derive(Clone, Debug)]
pub struct Record {
    pub state: PodState,
    pub answered: Instant,
}

impl Record {
    fn is_served(&self) -> bool {
        matches!(self.state, PodState::Added(_) | PodState::Kept)
    }

    fn retry_at(&self) -> Option<Instant> {
        match &self.state {
            PodState::Refused(refusal) => Some(refusal.retry_at),
            PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
        }
    }
}

#[derive(Debug, Default)]
pub struct Records {
    records: BTreeMap<PodUid, Record>,
    served: usize,
    /// The refused pods by the time of the retry, until [`Records::take_due`].
    retries: BTreeSet<(Instant, PodUid)>,
}

impl Records {
    pub fn get(&self, uid: &PodUid) -> Option<&Record> {
        self.records.get(uid)
    }

    pub fn state(&self, uid: &PodUid) -> Option<&PodState> {
        Some(&self.get(uid)?.state)
    }

    #[cfg(test)]
    pub(crate) fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.records.keys()
    }

    /// Returns the number of served pods.
    pub fn served(&self) -> usize {
        self.served
    }

    /// Replaces a pod's state; `None` forgets the pod.
    pub fn set(&mut self, uid: &PodUid, state: Option<PodState>, now: Instant) {
        if let Some(before) = self.records.remove(uid) {
            self.served -= usize::from(before.is_served());
            before
                .retry_at()
                .map(|at| self.retries.remove(&(at, uid.clone())));
        }
        if let Some(state) = state {
            let answered = now;
            let record = Record { state, answered };
            self.served += usize::from(record.is_served());
            let retry = record.retry_at().map(|at| (at, uid.clone()));
            self.retries.extend(retry);
            self.records.insert(uid.clone(), record);
        }
    }

    /// Forgets and returns the pods deleted within the snapshot.
    pub fn take_cleared(&mut self) -> Vec<PodUid> {
        let cleared = self
            .records
            .extract_if(.., |_, record| matches!(record.state, PodState::Cleared(_)));
        cleared.map(|(uid, _)| uid).collect()
    }

    /// Returns a pod whose retry is due; each retry is returned once.
    pub fn take_due(&mut self, now: Instant) -> Option<PodUid> {
        let (at, _) = self.retries.first()?;
        (*at <= now)
            .then(|| self.retries.pop_first())?
            .map(|it| it.1)
    }

    /// Returns the time of the next retry.
    pub fn next_retry(&self) -> Option<Instant> {
        self.retries.first().map(|(at, _)| *at)
    }
}
