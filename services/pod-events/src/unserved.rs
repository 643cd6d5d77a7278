//! Tracks the enrolled pods that no ztunnel serves: every connected ztunnel has refused the pod or has it in quarantine,
//! or no ztunnel has acknowledged the pod for a while. The broker sends such pods again; this module shows the state in
//! the pods' views.
//!
//! The broker announces refusals and changes of sessions, so nothing is asked while every pod is served.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use inpod_proto::ztunnelbroker::v1::{
    ListWorkloadsResponse, Session, SessionPhase, WorkloadPhase, WorkloadState, WorkloadStatus,
    watch_sessions_response::Event,
};
use inpod_service::Readiness;
use inpod_types::{Failure, Reason, SandboxRef};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    clients::{Clients, deadline_in},
    tasks::Registry,
};

/// The longest time without an acknowledgement that is no failure. A restart of ztunnel, or the snapshot of a full node,
/// takes less.
const ACKNOWLEDGEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The same until a ztunnel has connected to a new run of the broker. Stock ztunnel waits up to 15 s between attempts to
/// connect, and serves pods meanwhile.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);

/// The condition that ztunnels serve the enrolled pods, which does not affect readiness: inpod can do its work.
const CONDITION: &str = "pods-served";

/// The interval of queries while a pod is not served.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The delay of a query after an announcement, so that a burst of announcements causes few queries.
const SETTLING_TIME: Duration = Duration::from_millis(100);

/// The broker's announcements, of which each changes the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Announcements {
    events: u64,
    run: Option<String>,
    /// Set if a ztunnel has connected to this run of the broker.
    was_connected: bool,
}

impl Announcements {
    pub(crate) fn count(&mut self, event: &Event) {
        self.events = self.events.wrapping_add(1);
        #[expect(deprecated, reason = "the match covers every event")]
        match event {
            Event::InstanceId(run) if self.run.as_ref() == Some(run) => {}
            Event::InstanceId(run) => {
                (self.run, self.was_connected) = (Some(run.clone()), false);
            }
            Event::Session(session) => self.was_connected |= is_greeted(session),
            Event::WorkloadState(_) | Event::StateComplete(_) => {}
        }
    }
}

/// Updates the views of pods after each announcement of the broker, and periodically while a pod is not served.
pub(crate) async fn track_unserved(
    clients: Clients,
    registry: Registry,
    conditions: Readiness,
    mut announcements: watch::Receiver<Announcements>,
) {
    conditions.set(CONDITION, Ok(()));
    let mut tracker = Tracker::default();
    loop {
        let was_connected = announcements.borrow_and_update().was_connected;
        // These pods were acknowledged before the query: a missing acknowledgement was lost since.
        let enrolled = registry.sandboxes_with_ztunnel();
        if enrolled.is_empty() {
            tracker = Tracker::default();
            conditions.set(CONDITION, Ok(()));
        } else if let Ok(all) = clients.list_workloads(deadline_in(5)).await {
            let unserved = tracker.update(&enrolled, &all, was_connected, Instant::now());
            registry.set_unserved(&enrolled, &unserved);
            conditions.set(CONDITION, describe(&enrolled, &unserved));
        }
        // While the broker is away, which is a condition of its own, the last answer counts.
        let poll_at = Instant::now() + POLL_INTERVAL;
        tokio::select! {
            changed = announcements.changed() => match changed {
                Ok(()) => sleep(SETTLING_TIME).await,
                Err(_) => return,
            },
            () = sleep_until(poll_at), if tracker.has_unserved() => {}
        }
    }
}

fn describe(
    enrolled: &BTreeSet<SandboxRef>,
    unserved: &BTreeMap<SandboxRef, Arc<Failure>>,
) -> Result<(), String> {
    let Some(first) = unserved.values().next() else {
        return Ok(());
    };
    let (some, all) = (unserved.len(), enrolled.len());
    Err(format!("no ztunnel serves {some} of {all} pods: {first}"))
}

/// Remembers since when pods are not served.
#[derive(Debug, Default)]
struct Tracker {
    since: BTreeMap<SandboxRef, Instant>,
}

impl Tracker {
    fn has_unserved(&self) -> bool {
        !self.since.is_empty()
    }

    /// Returns the failures of the enrolled pods that no ztunnel serves.
    fn update(
        &mut self,
        enrolled: &BTreeSet<SandboxRef>,
        all: &ListWorkloadsResponse,
        was_connected: bool,
        now: Instant,
    ) -> BTreeMap<SandboxRef, Arc<Failure>> {
        let timeout = if was_connected {
            ACKNOWLEDGEMENT_TIMEOUT
        } else {
            CONNECTION_TIMEOUT
        };
        let known = statuses(all);
        let unserved = enrolled.iter().filter_map(|sandbox| {
            let service = judge(known.get(sandbox).copied(), &all.sessions, was_connected);
            Some((sandbox, service.err()?))
        });
        let unserved: BTreeMap<_, _> = unserved.collect();
        self.since
            .retain(|sandbox, _| unserved.contains_key(sandbox));
        let failures = unserved.into_iter().filter_map(|(sandbox, unserved)| {
            let since = *self.since.entry(sandbox.clone()).or_insert(now);
            let is_overdue = now.saturating_duration_since(since) >= timeout;
            let failure = Arc::new(unserved.failure);
            (unserved.is_final || is_overdue).then(|| (sandbox.clone(), failure))
        });
        failures.collect()
    }
}

/// The failure of a pod that no ztunnel serves.
#[derive(Debug, PartialEq, Eq)]
struct Unserved {
    failure: Failure,
    /// Set if every connected ztunnel has decided; otherwise an acknowledgement may be about to come.
    is_final: bool,
}

/// Returns whether a ztunnel serves a pod, given the broker's report on the pod.
fn judge(
    status: Option<&WorkloadStatus>,
    sessions: &[Session],
    was_connected: bool,
) -> Result<(), Unserved> {
    let states = status.map(|status| &*status.states).unwrap_or_default();
    let is_served =
        |it: &WorkloadState| matches!(it.phase(), WorkloadPhase::Added | WorkloadPhase::Kept);
    if states.iter().any(is_served) {
        return Ok(());
    }
    let is_quarantined = |it: &WorkloadState| it.phase() == WorkloadPhase::Quarantined;
    let is_refused = |it: &&WorkloadState| !it.error.is_empty() && !is_quarantined(it);
    let refusals: Vec<_> = states.iter().filter(is_refused).collect();
    let has_decided = |it: &WorkloadState| is_quarantined(it) || is_refused(&it);
    let is_final = !states.is_empty() && states.iter().all(has_decided);
    let failure = if !refusals.is_empty() {
        let errors: Vec<_> = refusals.iter().map(|it| it.error.as_str()).collect();
        let message = format!("ztunnel refused the pod: {}", errors.join("; "));
        Failure::new(Reason::ZtunnelRefused, message)
    } else if states.iter().any(is_quarantined) {
        let suspicion = status.and_then(|status| status.suspicion.as_ref());
        let cause = suspicion.map(|suspicion| suspicion.cause.as_str());
        let cause = cause.unwrap_or("unknown cause");
        let message = format!("ztunnel's connection ended repeatedly over the pod: {cause}");
        Failure::new(Reason::ZtunnelQuarantined, message)
    } else {
        without_answer(sessions, was_connected)
    };
    Err(Unserved { failure, is_final })
}

/// Returns why no ztunnel has decided about a pod.
fn without_answer(sessions: &[Session], was_connected: bool) -> Failure {
    let is_live = |session: &Session| session.phase() == SessionPhase::Live;
    let (reason, message) = if !sessions.iter().any(is_greeted) {
        if was_connected {
            (
                Reason::ZtunnelLost,
                "ztunnel has disconnected and has not come back",
            )
        } else {
            (Reason::ZtunnelNeverConnected, "no ztunnel is connected")
        }
    } else if sessions.iter().any(is_live) {
        (
            Reason::ZtunnelSilent,
            "ztunnel has not acknowledged the pod",
        )
    } else {
        let message = "ztunnel is connected, but its snapshot is not finished";
        (Reason::ZtunnelSnapshotUnfinished, message)
    };
    Failure::new(reason, message)
}

/// Returns whether the ztunnel has sent its hello.
fn is_greeted(session: &Session) -> bool {
    let phase = session.phase();
    matches!(phase, SessionPhase::Snapshot | SessionPhase::Live)
}

fn statuses(all: &ListWorkloadsResponse) -> BTreeMap<SandboxRef, &WorkloadStatus> {
    let named = all.workloads.iter().filter_map(|status| {
        let sandbox = status.workload.as_ref()?.sandbox.clone()?;
        Some((sandbox.try_into().ok()?, status))
    });
    named.collect()
}

#[cfg(test)]
mod tests;
