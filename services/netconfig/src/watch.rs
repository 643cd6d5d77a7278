//! WatchDrift: the state of every claimed netns, then changes.

use std::{collections::BTreeMap, vec};

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::netconfig::v1::{
    self, ClaimReleased, NetnsState, StateComplete, WatchDriftResponse, watch_drift_response,
};
use inpod_types::{Failure, Reason, SandboxRef};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tonic::Status;
use watch_drift_response::Event as ResponseEvent;

use crate::{
    apply::Observation,
    claims::{Event, Released, State},
    notifications::Reader,
};

type Item = Result<WatchDriftResponse, Status>;

pub(crate) fn watch(reader: Reader, instance_id: &str) -> impl Stream<Item = Item> + use<> {
    let (held, events) = reader.claims().subscribe();
    let first = stream::iter([Ok(response(ResponseEvent::InstanceId(
        instance_id.to_owned(),
    )))]);
    let watcher = Watcher {
        reader,
        pending_sandboxes: held.into_iter(),
        is_complete: false,
        events,
        known: BTreeMap::new(),
    };
    first.chain(stream::unfold(Some(watcher), async |watcher| {
        let mut watcher = watcher?;
        let item = watcher.next().await?;
        let may_continue = item.is_ok();
        Some((item, may_continue.then_some(watcher)))
    }))
}

struct Watcher {
    reader: Reader,
    /// States still to be sent. Names only: a slow watcher must not hold a netns open.
    pending_sandboxes: vec::IntoIter<SandboxRef>,
    is_complete: bool,
    events: Receiver<Event>,
    /// Revisions received initially. Older events may still be in `events`.
    known: BTreeMap<SandboxRef, u64>,
}

impl Watcher {
    async fn next(&mut self) -> Option<Item> {
        for sandbox in self.pending_sandboxes.by_ref() {
            // If the claim has ended, `events` has its end.
            if let Some(state) = self.reader.state(&sandbox).await {
                self.known.insert(sandbox, state.revision);
                return Some(Ok(describe_state(&state)));
            }
        }
        if !std::mem::replace(&mut self.is_complete, true) {
            return Some(Ok(response(ResponseEvent::StateComplete(StateComplete {}))));
        }
        self.next_change().await
    }

    async fn next_change(&mut self) -> Option<Item> {
        loop {
            match self.events.recv().await {
                Ok(Event::State(state)) if self.is_new(&state.sandbox, state.revision) => {
                    return Some(Ok(describe_state(&state)));
                }
                Ok(Event::Released(released))
                    if self.is_new(&released.sandbox, released.revision) =>
                {
                    return Some(Ok(describe_release(&released)));
                }
                Ok(Event::State(_) | Event::Released(_) | Event::Claimed(_)) => {}
                Err(RecvError::Lagged(missed)) => return Some(Err(lagged_status(missed))),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    fn is_new(&self, sandbox: &SandboxRef, revision: u64) -> bool {
        self.known
            .get(sandbox)
            .is_none_or(|known| *known < revision)
    }
}

fn describe_state(state: &State) -> WatchDriftResponse {
    let Observation {
        tag,
        intact,
        backend,
        proxies: _,
    } = &state.observation;
    let fingerprint = tag.as_ref().map(|tag| tag.fingerprint.to_string());
    let backend = backend.map_or(v1::Backend::Unspecified, Into::into);
    response(ResponseEvent::State(NetnsState {
        sandbox: Some((&state.sandbox).into()),
        netns: Some(state.netns.into()),
        fingerprint: fingerprint.unwrap_or_default(),
        intact: *intact,
        backend: backend.into(),
    }))
}

fn describe_release(released: &Released) -> WatchDriftResponse {
    response(ResponseEvent::ClaimReleased(ClaimReleased {
        sandbox: Some((&released.sandbox).into()),
        netns: Some(released.netns.into()),
    }))
}

fn response(event: ResponseEvent) -> WatchDriftResponse {
    WatchDriftResponse { event: Some(event) }
}

fn lagged_status(missed: u64) -> Status {
    let message =
        format!("{missed} events were dropped, the watcher is too slow: start a new watch");
    inpod_proto::into_status(&Failure::new(Reason::Overloaded, message))
}
