//! `WatchEnrollments`: a stream of the state of pods.
//!
//! A watcher computes an event only when its client reads an event, so the watcher's state is bounded by the node's
//! number of pods. Changes wait in the broadcast channel; a client that exceeds the channel's capacity has to read all
//! pods again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::{Stream, stream};
use inpod_proto::podevents::v1::{
    PodSummary, StateComplete, WatchEnrollmentsResponse, watch_enrollments_response::Event,
};
use inpod_types::{Failure, Reason};
use tokio::sync::{
    broadcast::{self, error::RecvError},
    watch,
};
use tonic::Status;

use super::{Selection, keys, to_status};
use crate::{
    explain,
    inventory::Inventory,
    pod::PodKey,
    tasks::{Registry, Shared},
};

/// Streams the current state, a marker for the end of the state, and then every change.
pub(super) fn enrollments(
    shared: Arc<Shared>,
    registry: Registry,
    instance_id: String,
    selection: Selection,
) -> impl Stream<Item = Result<WatchEnrollmentsResponse, Status>> + Send + use<> {
    // The watcher subscribes before the state is read, so that no change is missed.
    let pod_changes = shared.pod_changes.subscribe();
    let mut source = shared.source.changes();
    let before = Arc::clone(&source.borrow_and_update());
    let watcher = Watcher {
        pending: keys(&shared, &registry, &selection),
        shared,
        registry,
        instance_id: Some(instance_id),
        source: Some(source),
        sent: BTreeMap::new(),
        complete: false,
        selection,
        pod_changes,
        before,
    };
    stream::try_unfold(watcher, async |mut watcher| {
        let event = Some(watcher.next().await.map_err(to_status)?);
        Ok(Some((WatchEnrollmentsResponse { event }, watcher)))
    })
}

struct Watcher {
    shared: Arc<Shared>,
    registry: Registry,
    selection: Selection,
    pod_changes: broadcast::Receiver<Arc<PodKey>>,
    /// `None` once the source has ended.
    source: Option<watch::Receiver<Arc<Inventory>>>,
    before: Arc<Inventory>,
    instance_id: Option<String>,
    complete: bool,
    pending: BTreeSet<PodKey>,
    sent: BTreeMap<PodKey, PodSummary>,
}

impl Watcher {
    async fn next(&mut self) -> Result<Event, Failure> {
        if let Some(instance_id) = self.instance_id.take() {
            return Ok(Event::InstanceId(instance_id));
        }
        loop {
            while let Some(key) = self.pending.pop_first() {
                if let Some(event) = self.event_for(key) {
                    return Ok(event);
                }
            }
            if !std::mem::replace(&mut self.complete, true) {
                return Ok(Event::StateComplete(StateComplete {}));
            }
            self.wait().await?;
        }
    }

    /// Returns an event if the pod's summary changed.
    fn event_for(&mut self, key: PodKey) -> Option<Event> {
        let pod = explain::pod_info(&self.shared, &self.registry, &key);
        let pod = pod.filter(|pod| self.selection.matches(pod));
        let now = pod.as_ref().map(explain::summary);
        let is_other = |sent: &PodSummary| now.as_ref().is_none_or(|now| now.pod != sent.pod);
        if self.sent.get(&key).is_some_and(is_other) {
            let sent = self.sent.remove(&key)?;
            // The pod's successor under the same name is sent next.
            self.pending.insert(key);
            return Some(Event::Gone(sent.pod?));
        }
        let now = now?;
        let timeless = PodSummary {
            next_attempt_at: None,
            ..now.clone()
        };
        let before = self.sent.insert(key, timeless.clone());
        (before.as_ref() != Some(&timeless)).then_some(Event::Pod(now))
    }

    async fn wait(&mut self) -> Result<(), Failure> {
        tokio::select! {
            key = self.pod_changes.recv() => match key {
                Ok(key) if self.selection.matches_key(&key) => {
                    self.pending.insert(Arc::unwrap_or_clone(key));
                }
                Ok(_) => {}
                Err(error) => return Err(fell_behind(&error)),
            },
            now = changed(&mut self.source) => match now {
                Some(now) => self.add_affected(&now),
                None => self.source = None,
            },
        }
        Ok(())
    }

    fn add_affected(&mut self, now: &Arc<Inventory>) {
        let before = std::mem::replace(&mut self.before, Arc::clone(now));
        let touched = now.affected_since(&before).into_iter();
        self.pending
            .extend(touched.filter(|key| self.selection.matches_key(key)));
    }
}

/// Waits for a change of the source. Returns `None` when the source ends, and pends forever afterwards.
async fn changed(source: &mut Option<watch::Receiver<Arc<Inventory>>>) -> Option<Arc<Inventory>> {
    let Some(source) = source else {
        return std::future::pending().await;
    };
    source.changed().await.ok()?;
    Some(Arc::clone(&source.borrow_and_update()))
}

fn fell_behind(error: &RecvError) -> Failure {
    let missed = match error {
        RecvError::Lagged(missed) => format!("the watcher fell behind by {missed} changes"),
        RecvError::Closed => "the stream of changes has ended".to_owned(),
    };
    Failure::new(Reason::Overloaded, format!("{missed}; read all pods again"))
}

#[cfg(test)]
mod tests;
