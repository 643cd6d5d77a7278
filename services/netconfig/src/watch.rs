//! Serves WatchDrift, a stream of the state of every claimed netns, followed by changes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use inpod_proto::netconfig::v1::{
    ClaimReleased, NetnsState, NodeRepaired, StateComplete, WatchDriftResponse,
    watch_drift_response,
};
use inpod_types::{Failure, Reason, SandboxRef};
use tokio::sync::{
    broadcast::{Receiver, error::RecvError},
    watch,
};
use tonic::Status;
use watch_drift_response::Event as ResponseEvent;

use crate::{
    apply::Observation,
    claims::{Event, Released, State},
    notifications::Reader,
    probes::Repair,
};

/// Limits concurrent reads. Several run at once, so that a long change of one netns does not delay the states of
/// others.
const MAX_CONCURRENT_READS: usize = 8;

/// The age up to which a new watcher is sent the latest repair: pod-events connects after netconfig has started.
const MAX_REPAIR_AGE: Duration = Duration::from_secs(600);

/// Limits the sentences about a repair, because messages are bounded.
const MAX_DIFFERENCES: usize = 16;

type Item = Result<WatchDriftResponse, Status>;

pub(crate) fn watch(
    reader: Reader,
    mut repairs: watch::Receiver<Option<Repair>>,
    instance_id: &str,
) -> impl Stream<Item = Item> + use<> {
    let is_recent = |repair: &Repair| repair.at.elapsed().is_ok_and(|age| age < MAX_REPAIR_AGE);
    if repairs.borrow().as_ref().is_some_and(is_recent) {
        repairs.mark_changed();
    }
    let (held, events) = reader.claims().subscribe();
    let first = stream::iter([Ok(response(ResponseEvent::InstanceId(
        instance_id.to_owned(),
    )))]);
    let states = stream::iter(held).map(move |sandbox| {
        let reader = reader.clone();
        async move { reader.state(&sandbox).await }
    });
    let watcher = Watcher {
        states: states.buffer_unordered(MAX_CONCURRENT_READS).boxed(),
        is_complete: false,
        events,
        known: BTreeMap::new(),
        repairs,
    };
    first.chain(stream::unfold(Some(watcher), async |watcher| {
        let mut watcher = watcher?;
        let item = watcher.next().await?;
        let may_continue = item.is_ok();
        Some((item, may_continue.then_some(watcher)))
    }))
}

struct Watcher {
    /// States still to be read and sent.
    states: BoxStream<'static, Option<Arc<State>>>,
    is_complete: bool,
    events: Receiver<Event>,
    /// Revisions of the states sent initially, by which older events in `events` are recognised and skipped.
    known: BTreeMap<SandboxRef, u64>,
    repairs: watch::Receiver<Option<Repair>>,
}

impl Watcher {
    /// Returns the next item, which may be a change even before the last of the initial states.
    async fn next(&mut self) -> Option<Item> {
        loop {
            tokio::select! {
                biased;
                state = self.states.next(), if !self.is_complete => match state {
                    Some(Some(state)) => {
                        self.known.insert(state.sandbox.clone(), state.revision);
                        return Some(Ok(describe_state(&state)));
                    }
                    // The claim has ended, and `events` contains its end.
                    Some(None) => {}
                    None => {
                        self.is_complete = true;
                        return Some(Ok(response(ResponseEvent::StateComplete(StateComplete {}))));
                    }
                },
                event = self.events.recv() => match event {
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
                },
                repaired = self.repairs.changed() => match repaired {
                    Ok(()) => {
                        let repair = self.repairs.borrow_and_update().clone();
                        if let Some(repair) = repair {
                            return Some(Ok(describe_repair(repair)));
                        }
                    }
                    Err(_) => return None,
                },
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
        lacks_loopback: _,
        has_rules: _,
        proxies: _,
        uncaptured_udp_flows: _,
    } = &state.observation;
    let fingerprint = tag.as_ref().map(|tag| tag.fingerprint.to_string());
    response(ResponseEvent::State(NetnsState {
        sandbox: Some((&state.sandbox).into()),
        netns: Some(state.netns.into()),
        fingerprint: fingerprint.unwrap_or_default(),
        intact: *intact,
    }))
}

fn describe_release(released: &Released) -> WatchDriftResponse {
    response(ResponseEvent::ClaimReleased(ClaimReleased {
        sandbox: Some((&released.sandbox).into()),
        netns: Some(released.netns.into()),
    }))
}

fn describe_repair(repair: Repair) -> WatchDriftResponse {
    let mut differences = repair.differences;
    differences.truncate(MAX_DIFFERENCES);
    response(ResponseEvent::NodeRepaired(NodeRepaired {
        at: Some(repair.at.into()),
        differences,
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

#[cfg(test)]
mod tests {
    use inpod_types::NetnsId;
    use tokio::{sync::broadcast, time::timeout};

    use super::*;

    #[tokio::test]
    async fn a_netns_whose_state_cannot_be_read_yet_delays_no_event_of_another() {
        let (sender, events) = broadcast::channel(4);
        let mut watcher = Watcher {
            states: stream::pending().boxed(),
            is_complete: false,
            events,
            known: BTreeMap::new(),
            repairs: watch::channel(None).1,
        };
        let released = Released {
            sandbox: SandboxRef {
                network_name: "net".parse().unwrap(),
                container_id: "c1".parse().unwrap(),
                ifname: "eth0".parse().unwrap(),
            },
            netns: NetnsId {
                device: 4,
                inode: 1,
                cookie: 1,
            },
            revision: 1,
        };
        sender.send(Event::Released(released.clone())).unwrap();
        let next = timeout(Duration::from_secs(20), watcher.next()).await;
        let event = next.expect("it waits").unwrap().unwrap().event;
        assert_eq!(event, describe_release(&released).event);
    }
}
