//! Replays events that happened while pod-events was away. The events are only recorded; the following reconcile acts
//! on the records, so that replaying waits for no other service.

use std::{sync::Arc, time::Duration};

use super::{AddCall, Task};
use crate::{
    boottime::BootInstant,
    checkpoint::{CheckpointError, Intent, Record},
    inventory::Inventory,
    pod::Pod,
};

/// The time that the source may take to show an admitted pod.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct OfflineAdd {
    /// The replayed call, whose deadlines are meaningless.
    pub call: AddCall,
    pub at: BootInstant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayOutcome {
    /// The effect is checkpointed, or the event has no effect any more.
    Done,
    /// The event is obsolete for the given reason.
    Dropped(String),
    /// The event has to be replayed again for the given reason.
    Retry(String),
}

impl From<CheckpointError> for ReplayOutcome {
    fn from(error: CheckpointError) -> Self {
        Self::Retry(format!("{:#}", anyhow::Error::from(error)))
    }
}

impl Task {
    pub(super) fn replay_delete(&mut self, sandbox: &inpod_types::SandboxRef) -> ReplayOutcome {
        let Some(index) = self.index_of(sandbox) else {
            return ReplayOutcome::Done;
        };
        let Some(record) = self.records.get_mut(index).map(Arc::make_mut) else {
            return ReplayOutcome::Done;
        };
        let checkpoint = &self.shared.pipeline.checkpoint;
        let written = if record.is_bare() {
            // The record may have another network name.
            checkpoint.remove(&record.sandbox)
        } else {
            // An earlier DEL keeps its time.
            if !matches!(record.intent, Intent::Deleting { .. }) {
                let since = BootInstant::now();
                record.intent = Intent::Deleting { since };
            }
            checkpoint.write(record)
        };
        if let Err(error) = written {
            return error.into();
        }
        if record.is_bare() {
            self.records.remove(index);
        }
        self.timeline
            .note(format!("sandbox {sandbox} ended while pod-events was away"));
        self.publish_view();
        ReplayOutcome::Done
    }

    /// Records an admitted sandbox, which becomes the current sandbox and stays outside the mesh until the next
    /// reconcile.
    pub(super) fn replay_add(&mut self, admitted: &OfflineAdd) -> ReplayOutcome {
        let call = &admitted.call;
        let inventory = self.shared.source.inventory();
        let fits = |pod: &&Pod| call.uid.as_ref().is_none_or(|uid| pod.has_uid(uid));
        let Some(pod) = inventory.pod(&self.key).filter(fits) else {
            return missing(&inventory, admitted.at);
        };
        if let Some(settled) = self.existing_outcome(admitted, pod) {
            return settled;
        }
        let record = self.new_record(call, pod, self.shared.decide(pod).enrollment);
        if let Err(error) = self.shared.pipeline.checkpoint.write(&record) {
            return error.into();
        }
        self.records.retain(|known| known.sandbox != record.sandbox);
        self.records.push(record.into());
        self.timeline.note(format!(
            "sandbox {} was admitted unenrolled while pod-events was away",
            call.sandbox
        ));
        self.publish_view();
        ReplayOutcome::Done
    }

    /// Returns an outcome if the sandbox need not or cannot be recorded now.
    fn existing_outcome(&self, admitted: &OfflineAdd, pod: &Pod) -> Option<ReplayOutcome> {
        let call = &admitted.call;
        if self.is_additional_interface(&call.sandbox) {
            let why = "its container is recorded with another interface";
            return Some(ReplayOutcome::Dropped(why.to_owned()));
        }
        if self
            .records
            .iter()
            .any(|known| known.sandbox != call.sandbox && is_successor(known, pod, admitted.at))
        {
            let why = "the pod has a later sandbox";
            return Some(ReplayOutcome::Dropped(why.to_owned()));
        }
        let known = self.records.get(self.index_of(&call.sandbox)?)?;
        let lives = known.has_netns(&call.netns) && !is_ending(known);
        match (lives, known.is_bare()) {
            (true, _) => Some(ReplayOutcome::Done),
            (false, true) => None,
            (false, false) => Some(ReplayOutcome::Retry(
                "an earlier sandbox of its name has not ended yet".to_owned(),
            )),
        }
    }
}

/// Returns the outcome for a pod that the source does not show: the pod may still appear.
fn missing(inventory: &Inventory, at: BootInstant) -> ReplayOutcome {
    if inventory.is_complete() && BootInstant::now().since(at) >= SOURCE_TIMEOUT {
        ReplayOutcome::Dropped("the source does not show the pod".to_owned())
    } else {
        ReplayOutcome::Retry("the source does not show the pod yet".to_owned())
    }
}

fn is_ending(record: &Record) -> bool {
    matches!(record.intent, Intent::Deleting { .. })
}

/// Returns whether a later sandbox of the pod was recorded after `at`. Revisions also count from boot.
fn is_successor(record: &Record, pod: &Pod, at: BootInstant) -> bool {
    let later = u128::from(record.revision.0) > at.since_boot().as_nanos();
    record.belongs_to(pod) && !is_ending(record) && later
}
