use std::time::SystemTime;

use inpod_types::Failure;

use crate::{checkpoint::Record, drift::Drift, explain::state, plan::Action, timeline::Timeline};

/// A pod as people see it, without waiting for what is being done.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Its sandboxes, the current one last.
    pub records: Vec<Record>,
    /// The last failure that has not been mended.
    pub failure: Option<Failure>,
    /// What happened.
    pub timeline: Timeline,
    /// When something is attempted next, if anything is due.
    pub next_attempt: Option<SystemTime>,
    /// What is attempted then; `None`: its netns is claimed again.
    pub next: Option<Action>,
    /// Since when the current sandbox has been in its state; `None` where it was so before this run.
    pub since: Option<SystemTime>,
    /// How often something was not as it was left.
    pub drift: Drift,
}

impl View {
    /// Since when a pod that was seen so stands where these records say.
    pub(super) fn state_since(&self, records: &[Record]) -> Option<SystemTime> {
        let place = |record: &Record| (record.sandbox.clone(), state(Some(record)));
        let before = self.records.last().map(place);
        match records.last().map(place) {
            now if now == before => self.since,
            now => now.map(|_| SystemTime::now()),
        }
    }
}
