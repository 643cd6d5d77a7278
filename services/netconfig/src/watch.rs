//! What is in the claimed netns, as a stream: all of it first, then changes.

use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use inpod_proto::netconfig::v1::{
    ClaimReleased, NetnsState, StateComplete, WatchDriftResponse, watch_drift_response,
};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tonic::Status;
use watch_drift_response::Event as Said;
use workload::{Failure, Reason};

use crate::{
    apply::Writer,
    claims::{Claim, Claims, Event},
    error::chain,
};

type Item = Result<WatchDriftResponse, Status>;

/// The stream of one watcher.
pub(crate) fn watch(claims: Arc<Claims>, instance_id: &str) -> impl Stream<Item = Item> + use<> {
    let (held, events) = claims.subscribe();
    let first = stream::iter([Ok(say(Said::InstanceId(instance_id.to_owned())))]);
    let looked_up = Arc::clone(&claims);
    let states = stream::iter(held).filter_map(move |sandbox| {
        let claim = looked_up.find(&sandbox);
        async { Some(Ok(state(claim?).await)) }
    });
    let complete = stream::iter([Ok(say(Said::StateComplete(StateComplete {})))]);
    first
        .chain(states)
        .chain(complete)
        .chain(changes(claims, events))
}

fn changes(claims: Arc<Claims>, events: Receiver<Event>) -> impl Stream<Item = Item> {
    stream::unfold(Some((claims, events)), async |watcher| {
        let (claims, mut events) = watcher?;
        match next(&claims, &mut events).await? {
            Ok(said) => Some((Ok(said), Some((claims, events)))),
            Err(status) => Some((Err(status), None)),
        }
    })
}

async fn next(claims: &Claims, events: &mut Receiver<Event>) -> Option<Item> {
    loop {
        match events.recv().await {
            Ok(Event::Changed(sandbox)) => {
                // One that is gone by now has its end among the next events.
                if let Some(claim) = claims.find(&sandbox) {
                    return Some(Ok(state(claim).await));
                }
            }
            Ok(Event::Released(sandbox, netns)) => {
                return Some(Ok(say(Said::ClaimReleased(ClaimReleased {
                    sandbox: Some((&sandbox).into()),
                    netns: Some(netns.into()),
                }))));
            }
            Err(RecvError::Lagged(missed)) => return Some(Err(too_slow(missed))),
            Err(RecvError::Closed) => return None,
        }
    }
}

/// What the kernel holds at this moment. A netns that cannot be read has no rules to vouch for.
async fn state(claim: Arc<Claim>) -> WatchDriftResponse {
    let (sandbox, netns) = (claim.sandbox.clone(), claim.netns.id());
    let read = tokio::task::spawn_blocking(move || {
        let observed = Writer::default().observe(&claim.netns);
        observed.map(|observed| observed.tag)
    });
    let tag = match read.await {
        Ok(Ok(tag)) => tag,
        Ok(Err(error)) => {
            let error = chain(&error);
            tracing::warn!(%sandbox, error, "Cannot read a netns's rules");
            None
        }
        Err(error) => {
            tracing::error!(%sandbox, %error, "The read of a netns's rules failed");
            None
        }
    };
    say(Said::State(NetnsState {
        sandbox: Some((&sandbox).into()),
        netns: Some(netns.into()),
        fingerprint: tag
            .map(|tag| tag.fingerprint.to_string())
            .unwrap_or_default(),
        ..NetnsState::default()
    }))
}

fn say(event: Said) -> WatchDriftResponse {
    WatchDriftResponse { event: Some(event) }
}

fn too_slow(missed: u64) -> Status {
    let message = format!("{missed} events were missed: read everything again");
    inpod_proto::into_status(&Failure::new(Reason::Overloaded, message))
}
