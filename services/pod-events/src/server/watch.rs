//! The pods and what becomes of them, as a stream.
//!
//! A watcher is asked for its next event only when its client takes one. It remembers which pods are to be looked at
//! and what was sent of each, both bounded by the pods of the node; what waits beyond that waits in the hub, and a
//! client that leaves more there than it holds has to read again.

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

use super::{Selection, failed, keys};
use crate::{
    explain,
    registry::Registry,
    source::{Inventory, PodKey},
    task::Shared,
};

/// The state at first, its end, then every change.
pub(super) fn enrollments(
    shared: Arc<Shared>,
    registry: Registry,
    instance_id: String,
    selection: Selection,
) -> impl Stream<Item = Result<WatchEnrollmentsResponse, Status>> + Send + use<> {
    let watcher = Watcher::new(shared, registry, instance_id, selection);
    stream::unfold(Some(watcher), |watcher| async {
        let mut watcher = watcher?;
        Some(match watcher.next().await {
            Ok(event) => (
                Ok(WatchEnrollmentsResponse { event: Some(event) }),
                Some(watcher),
            ),
            Err(failure) => (Err(failed(failure)), None),
        })
    })
}

struct Watcher {
    shared: Arc<Shared>,
    registry: Registry,
    selection: Selection,
    /// Whose views changed.
    shown: broadcast::Receiver<Arc<PodKey>>,
    /// What the source shows; `None` once it has nothing more to tell.
    source: Option<watch::Receiver<Arc<Inventory>>>,
    /// What it showed when it was looked at last.
    before: Arc<Inventory>,
    instance_id: Option<String>,
    complete: bool,
    /// Who is to be looked at.
    due: BTreeSet<PodKey>,
    /// What was sent of each.
    sent: BTreeMap<PodKey, PodSummary>,
}

impl Watcher {
    fn new(
        shared: Arc<Shared>,
        registry: Registry,
        instance_id: String,
        selection: Selection,
    ) -> Self {
        // Whatever changes from here on is heard of.
        let shown = shared.shown.changes();
        let mut source = shared.source.changes();
        let before = Arc::clone(&source.borrow_and_update());
        Self {
            due: keys(&shared, &registry, &selection),
            shared,
            registry,
            instance_id: Some(instance_id),
            source: Some(source),
            sent: BTreeMap::new(),
            complete: false,
            selection,
            shown,
            before,
        }
    }

    async fn next(&mut self) -> Result<Event, Failure> {
        if let Some(instance_id) = self.instance_id.take() {
            return Ok(Event::InstanceId(instance_id));
        }
        loop {
            while let Some(key) = self.due.pop_first() {
                if let Some(event) = self.look(key) {
                    return Ok(event);
                }
            }
            if !std::mem::replace(&mut self.complete, true) {
                return Ok(Event::StateComplete(StateComplete {}));
            }
            self.hear().await?;
        }
    }

    /// What is to be told of a pod, if that is anything new.
    fn look(&mut self, key: PodKey) -> Option<Event> {
        let known = explain::known(&self.shared, &self.registry, &key);
        let known = known.filter(|known| self.selection.is_of(known));
        let now = known.as_ref().map(explain::summary);
        let is_other = |sent: &PodSummary| now.as_ref().is_none_or(|now| now.pod != sent.pod);
        if self.sent.get(&key).is_some_and(is_other) {
            let sent = self.sent.remove(&key)?;
            // Its successor is told next.
            self.due.insert(key);
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

    /// Waits until something is due.
    async fn hear(&mut self) -> Result<(), Failure> {
        tokio::select! {
            key = self.shown.recv() => match key {
                Ok(key) if self.selection.takes(&key) => {
                    self.due.insert(Arc::unwrap_or_clone(key));
                }
                Ok(_) => {}
                Err(error) => return Err(behind(&error)),
            },
            now = changed(&mut self.source) => match now {
                Some(now) => self.compare(&now),
                None => self.source = None,
            },
        }
        Ok(())
    }

    fn compare(&mut self, now: &Arc<Inventory>) {
        let before = std::mem::replace(&mut self.before, Arc::clone(now));
        let touched = now.touched_since(&before).into_iter();
        self.due
            .extend(touched.filter(|key| self.selection.takes(key)));
    }
}

/// What the source shows next; `None` when it ends. Never, where it has.
async fn changed(source: &mut Option<watch::Receiver<Arc<Inventory>>>) -> Option<Arc<Inventory>> {
    let Some(source) = source else {
        return std::future::pending().await;
    };
    source.changed().await.ok()?;
    Some(Arc::clone(&source.borrow_and_update()))
}

fn behind(error: &RecvError) -> Failure {
    let missed = match error {
        RecvError::Lagged(missed) => format!("the watcher fell behind by {missed} changes"),
        RecvError::Closed => "nothing more is told".to_owned(),
    };
    Failure::new(Reason::Overloaded, format!("{missed}; read again"))
}

#[cfg(test)]
mod tests;
