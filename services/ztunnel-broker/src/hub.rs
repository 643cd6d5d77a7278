//! Connects RPCs and sessions: shares the state behind a lock that is never held across an await, and fetches
//! descriptors.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::StreamExt as _;
use inpod_proto::{Invalid, ztunnelbroker::v1 as wire};
use inpod_service::Readiness;
use inpod_types::{Failure, PodUid, Reason, Revision, SandboxRef, Workload};
use tokio::{
    sync::{Notify, broadcast, watch},
    time::{Instant, timeout_at},
};

use crate::{
    descriptors::{Descriptor, Descriptors},
    metrics::Metrics,
    outcome,
    session::SessionId,
    state::State,
    view,
};

const MAX_CONCURRENT_FETCHES: usize = 8;
const FETCH_RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    descriptors: Descriptors,
    /// Notified when descriptors may be missing: after a new set.
    missing: Notify,
    metrics: Metrics,
    /// `None` until pod-events has reported the ztunnel pods.
    ztunnels: watch::Sender<Option<BTreeSet<PodUid>>>,
}

/// Returns the time of tokio's clock, which tests can pause.
pub(crate) fn now() -> std::time::Instant {
    Instant::now().into_std()
}

impl Hub {
    /// Starts without a desired set. Closes sessions that are silent for `ack_timeout`. `conditions` receives the state
    /// of readiness.
    pub fn new(
        descriptors: Descriptors,
        ack_timeout: Duration,
        conditions: Readiness,
    ) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::new(ack_timeout, conditions)),
            descriptors,
            missing: Notify::new(),
            metrics: Metrics::default(),
            ztunnels: watch::Sender::new(None),
        })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the number of open descriptors.
    pub fn descriptors(&self) -> u64 {
        self.descriptors.open()
    }

    pub fn set(&self, revision: Revision, all: Vec<Workload>) {
        self.state().set(revision, all, now());
        self.missing.notify_one();
    }

    /// Adds a workload and waits until `deadline` for the first positive acknowledgement. The workload stays desired
    /// without one, and after the future is dropped.
    ///
    /// # Errors
    ///
    /// If the workload cannot be added, or no ztunnel serves it in time; see [`crate::outcome`].
    pub async fn add(&self, workload: Workload, deadline: Instant) -> Result<SessionId, Failure> {
        let descriptor = self.descriptor_of(&workload, deadline).await?;
        let mut waits = self.state().add(workload.clone(), descriptor, now())?;
        loop {
            let decided = outcome::decide(&self.state(), &workload, now());
            if let Some(outcome) = decided {
                return outcome;
            }
            // The sender lives as long as its receiver, so only time ends the wait.
            if timeout_at(deadline, waits.changed()).await.is_err() {
                return Err(outcome::timeout_cause(&self.state(), &workload, now()));
            }
        }
    }

    async fn descriptor_of(
        &self,
        workload: &Workload,
        deadline: Instant,
    ) -> Result<Descriptor, Failure> {
        // A workload without a netns can be kept, but not added.
        let Some(netns) = workload.netns else {
            return Err(Invalid::new("workload.netns", "workload.netns is required").into());
        };
        let held = {
            let state = self.state();
            state.desired().check_add(workload)?;
            let entry = state.desired().get(&workload.sandbox);
            entry.and_then(|entry| entry.descriptor.clone())
        };
        match held.filter(|held| held.netns() == netns) {
            Some(held) => Ok(held),
            None => {
                let fetching = self.descriptors.fetch(&workload.sandbox, netns);
                timeout_at(deadline, fetching).await.unwrap_or_else(|_| {
                    let message = "netconfig did not hand over the descriptor in the caller's time";
                    Err(Failure::new(Reason::DescriptorUnavailable, message))
                })
            }
        }
    }

    pub fn set_ztunnels(&self, pods: BTreeSet<PodUid>) {
        self.ztunnels.send_replace(Some(pods));
    }

    /// `None` until pod-events has reported the ztunnel pods.
    pub fn ztunnels(&self) -> watch::Receiver<Option<BTreeSet<PodUid>>> {
        self.ztunnels.subscribe()
    }

    pub async fn fetch_missing(&self) -> Infallible {
        let mut reported = 0;
        loop {
            let failed = self.fetch_round().await;
            // The failure is logged only when the number changes: an unavailable netconfig must not fill the log.
            if let Some((sandbox, failure)) = failed.first().filter(|_| failed.len() != reported) {
                let (missing, error) = (failed.len(), &failure.message);
                tracing::warn!(missing, %sandbox, error, "Descriptors are missing");
            }
            reported = failed.len();
            let again = tokio::time::timeout(FETCH_RETRY_INTERVAL, self.missing.notified());
            if reported == 0 {
                self.missing.notified().await;
            } else if again.await.is_err() {
                tracing::debug!(missing = reported, "Fetching descriptors again");
            }
        }
    }

    async fn fetch_round(&self) -> Vec<(SandboxRef, Failure)> {
        let missing: Vec<_> = {
            let state = self.state();
            let missing = state.desired().missing();
            missing.map(|(it, netns)| (it.clone(), netns)).collect()
        };
        futures_util::stream::iter(missing)
            .map(async |(sandbox, netns)| {
                let fetched = self.descriptors.fetch(&sandbox, netns).await;
                let stored =
                    fetched.map(|descriptor| self.state().store(&sandbox, descriptor, now()));
                stored.map_err(|failure| (sandbox, failure))
            })
            .buffer_unordered(MAX_CONCURRENT_FETCHES)
            .filter_map(|fetched| std::future::ready(fetched.err()))
            .collect()
            .await
    }

    /// Returns the desired set, ordered by sandbox, with each workload's state, and the sessions, oldest first.
    pub fn list(&self) -> wire::ListWorkloadsResponse {
        let state = self.state();
        let mut entries: Vec<_> = state.desired().entries().collect();
        entries.sort_by(|one, other| one.workload.sandbox.cmp(&other.workload.sandbox));
        let workloads = entries.into_iter().map(|entry| {
            let uid = &entry.workload.uid;
            let current = state.desired().current(uid);
            // A sandbox that its pod no longer uses has no state in any session.
            let current = current.filter(|it| it.workload.sandbox == entry.workload.sandbox);
            let states = current.into_iter().flat_map(|entry| {
                let phases = state.phases(entry, now());
                phases.filter_map(|(id, phase)| {
                    let session = state.sessions().get(&id)?;
                    Some(view::workload_state(id, session, entry, phase))
                })
            });
            let suspicion = state.inputs().quarantine.suspicion(uid);
            view::workload_status(entry, states.collect(), suspicion)
        });
        wire::ListWorkloadsResponse {
            instance_id: String::new(),
            seeded: state.desired().is_seeded(),
            workloads: workloads.collect(),
            sessions: sessions(&state),
        }
    }

    /// Returns whether the set is known, the sessions, and a receiver of later changes.
    pub fn watch(&self) -> (bool, Vec<wire::Session>, broadcast::Receiver<wire::Session>) {
        let state = self.state();
        (
            state.desired().is_seeded(),
            sessions(&state),
            state.events(),
        )
    }
}

fn sessions(state: &State) -> Vec<wire::Session> {
    let sessions = state.sessions().iter().map(|(id, session)| {
        let queued = session.queued(state.inputs(), now());
        view::session(*id, session, session.phase(), queued)
    });
    sessions.collect()
}
