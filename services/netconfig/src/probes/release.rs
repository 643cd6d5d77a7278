//! Removes a pod's addresses from the probe set when netconfig releases the pod's netns.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use inpod_types::{SandboxRef, with_causes};
use tokio::{
    sync::broadcast::error::RecvError,
    time::{MissedTickBehavior, interval},
};

use super::ProbeSet;
use crate::{
    claims::{Claims, Event},
    rules::sandbox_name,
};

/// The interval of sweeps for elements of unclaimed sandboxes.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);

/// Removes the addresses of released sandboxes, until no more claims can end.
pub(crate) async fn run(probe_set: Arc<ProbeSet>, claims: Arc<Claims>) {
    let (_, mut events) = claims.subscribe();
    let mut ticks = interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Ok(Event::Released(released)) => {
                    release(&probe_set, &claims, released.sandbox).await;
                }
                // The sweep makes up for missed events.
                Ok(Event::Claimed(_) | Event::State(_)) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            },
            _ = ticks.tick() => sweep(&probe_set, &claims).await,
        }
    }
}

/// Removes the addresses of a released sandbox, unless the sandbox has a new claim, which has set the addresses again
/// or is about to. After a failure, the sweep tries again.
pub(crate) async fn release(probe_set: &Arc<ProbeSet>, claims: &Arc<Claims>, sandbox: SandboxRef) {
    let (probe_set, claims) = (Arc::clone(probe_set), Arc::clone(claims));
    let work = move || {
        let result = probe_set.release_unless(&sandbox, || claims.find(&sandbox).is_some());
        if let Err(error) = result {
            let error = with_causes(&error);
            tracing::warn!(%sandbox, error, "Cannot remove the addresses of a released sandbox from the probe set");
        }
    };
    blocking(work).await;
}

async fn sweep(probe_set: &Arc<ProbeSet>, claims: &Arc<Claims>) {
    let (probe_set, claims) = (Arc::clone(probe_set), Arc::clone(claims));
    let work = move || {
        let claims = claims.list();
        let claimed: BTreeSet<_> = claims
            .iter()
            .map(|claim| sandbox_name(&claim.sandbox))
            .collect();
        probe_set.remove_unclaimed(&claimed);
    };
    blocking(work).await;
}

async fn blocking(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = tokio::task::spawn_blocking(work).await {
        tracing::error!(%error, "Work on the probe set failed");
    }
}
