//! Connects RPCs and sessions: holds the state behind a lock that is never held across an await, and wakes the tasks
//! that a change concerns.

mod queries;

pub use queries::{Listed, Status};

use std::{
    collections::BTreeSet,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::StreamExt as _;
use inpod_service::Readiness;
use inpod_types::{NetnsId, PodUid, Revision, SandboxRef, Workload, with_causes};
use tokio::{
    sync::{Notify, broadcast, watch},
    time::{Instant, timeout_at},
};

use crate::{
    descriptors::{Descriptor, Descriptors, FetchError},
    desired::ChangeError,
    error::AddError,
    message::Message,
    metrics::Metrics,
    nack::Nack,
    peer::Peer,
    session::{Answered, Session, SessionEnd, Stage},
    session_view::SessionView,
    sessions::SessionId,
    state::State,
};

/// The number of changes of sessions that a watcher may lag behind.
const MAX_WATCHER_LAG: usize = 256;

const MAX_CONCURRENT_FETCHES: usize = 8;
const FETCH_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The condition that the desired set is known. The broker sends ztunnels nothing before.
const SEEDED: &str = "desired-set";

const ZTUNNEL: &str = "ztunnel";
const NO_ZTUNNEL: &str = "no ztunnel has acknowledged its snapshot";

#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    descriptors: Descriptors,
    changed: watch::Sender<()>,
    /// Notified when descriptors may be missing: after a new set.
    missing: Notify,
    events: broadcast::Sender<SessionView>,
    metrics: Metrics,
    conditions: Readiness,
    /// `None` until pod-events has reported the ztunnel pods.
    ztunnels: watch::Sender<Option<BTreeSet<PodUid>>>,
}

impl Hub {
    /// Starts without a desired set. Closes sessions that are silent for `ack_timeout`. `conditions` receives the state
    /// of readiness.
    pub fn new(
        descriptors: Descriptors,
        ack_timeout: Duration,
        conditions: Readiness,
    ) -> Arc<Self> {
        conditions.require(SEEDED, "pod-events has not sent the desired set");
        conditions.set(ZTUNNEL, Err(NO_ZTUNNEL.to_owned()));
        Arc::new(Self {
            state: Mutex::new(State::new(ack_timeout)),
            descriptors,
            changed: watch::Sender::new(()),
            missing: Notify::new(),
            events: broadcast::Sender::new(MAX_WATCHER_LAG),
            metrics: Metrics::default(),
            conditions,
            ztunnels: watch::Sender::new(None),
        })
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub fn set(&self, revision: Revision, all: Vec<Workload>) {
        self.update(|state, now| state.set(revision, all, now));
        self.conditions.set(SEEDED, Ok(()));
        self.missing.notify_one();
    }

    /// Adds a workload and waits until `deadline` for the first positive acknowledgement. The workload stays desired
    /// without one, and after the future is dropped.
    pub async fn add(&self, workload: Workload, deadline: Instant) -> Result<SessionId, AddError> {
        let descriptor = self.descriptor_of(&workload, deadline).await?;
        let mut ticket = self.update(|state, now| state.add(workload, descriptor, now))?;
        let outcome = ticket.outcome.wait_for(Option::is_some);
        // The state knows the outcome, or why there is none at the deadline.
        drop(timeout_at(deadline, outcome).await);
        Ok(self.with_state(|state, now| state.outcome(&ticket, now))?)
    }

    async fn descriptor_of(
        &self,
        workload: &Workload,
        deadline: Instant,
    ) -> Result<Descriptor, AddError> {
        let Some(netns) = workload.netns else {
            return Err(AddError::NoNetns);
        };
        let held = {
            let state = self.lock();
            state.check_running()?;
            state.desired().check_add(workload)?;
            let entry = state.desired().get(&workload.sandbox);
            entry.and_then(|entry| entry.descriptor().cloned())
        };
        if let Some(held) = held.filter(|held| held.netns() == netns) {
            return Ok(held);
        }
        let fetched = timeout_at(deadline, self.descriptors.fetch(&workload.sandbox, netns)).await;
        Ok(fetched.map_err(|_| AddError::FetchLate)??)
    }

    /// Removes a workload and returns once its descriptor is closed.
    ///
    /// # Errors
    ///
    /// If the desired set is not known yet, or a newer revision is known.
    pub fn remove(&self, sandbox: &SandboxRef, revision: Revision) -> Result<(), ChangeError> {
        self.update(|state, now| state.remove(sandbox, revision, now))
    }

    pub fn set_ztunnels(&self, pods: BTreeSet<PodUid>) {
        self.ztunnels.send_replace(Some(pods));
    }

    /// `None` until pod-events has reported the ztunnel pods.
    pub fn ztunnels(&self) -> watch::Receiver<Option<BTreeSet<PodUid>>> {
        self.ztunnels.subscribe()
    }

    /// Stops sending messages and ends all waits.
    pub fn stop(&self) {
        self.update(|state, _| state.stop());
    }

    pub async fn fetch_missing(&self) -> Infallible {
        let mut reported = 0;
        loop {
            let failed = self.fetch_round().await;
            // The failure is logged only when the number changes: an unavailable netconfig must not fill the log.
            if let Some((sandbox, error)) = failed.first().filter(|_| failed.len() != reported) {
                let (missing, error) = (failed.len(), with_causes(error));
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

    async fn fetch_round(&self) -> Vec<(SandboxRef, FetchError)> {
        let missing: Vec<_> = {
            let state = self.lock();
            let missing = state.desired().missing();
            missing.map(|(it, netns)| (it.clone(), netns)).collect()
        };
        futures_util::stream::iter(missing)
            .map(|(sandbox, netns)| self.fetch(sandbox, netns))
            .buffer_unordered(MAX_CONCURRENT_FETCHES)
            .filter_map(|fetched| std::future::ready(fetched.err()))
            .collect()
            .await
    }

    async fn fetch(
        &self,
        sandbox: SandboxRef,
        netns: NetnsId,
    ) -> Result<(), (SandboxRef, FetchError)> {
        match self.descriptors.fetch(&sandbox, netns).await {
            Ok(it) => {
                self.update(|state, now| state.store(&sandbox, it, now));
                Ok(())
            }
            Err(error) => Err((sandbox, error)),
        }
    }

    /// Notifies of every change that may concern a session.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(crate) fn connect(&self, peer: Peer) -> SessionId {
        self.with_state(|state, now| state.connect(peer, now))
    }

    pub(crate) fn hello(&self, id: SessionId) {
        self.with_state(|state, now| state.hello(id, now));
    }

    pub(crate) fn next(&self, id: SessionId) -> Option<Message> {
        self.with_state(|state, now| state.next(id, now))
    }

    pub(crate) fn ack(
        &self,
        id: SessionId,
        answer: Result<(), Nack>,
    ) -> Result<Answered, SessionEnd> {
        let (answered, cleared) = self.with_state(|state, now| {
            let answered = state.ack(id, answer, now);
            (answered, state.take_cleared())
        });
        if cleared {
            self.changed.send_replace(());
        }
        answered
    }

    pub(crate) fn on_send_failed(&self, id: SessionId) {
        self.lock().on_send_failed(id);
    }

    pub(crate) fn wake_at(&self, id: SessionId) -> Option<Instant> {
        self.lock().wake_at(id).map(Instant::from_std)
    }

    pub(crate) fn check_deadline(&self, id: SessionId) -> Result<(), SessionEnd> {
        self.lock().check_deadline(id, Instant::now().into_std())
    }

    pub(crate) fn disconnect(&self, id: SessionId, why: &str) {
        self.with_state(|state, now| state.disconnect(id, why, now));
    }

    fn update<T>(&self, act: impl FnOnce(&mut State, std::time::Instant) -> T) -> T {
        let result = self.with_state(act);
        self.changed.send_replace(());
        result
    }

    fn with_state<T>(&self, act: impl FnOnce(&mut State, std::time::Instant) -> T) -> T {
        let mut state = self.lock();
        let result = act(&mut state, Instant::now().into_std());
        for event in state.take_events() {
            self.conditions.set(ZTUNNEL, ztunnel_condition(&state));
            self.events.send(event).unwrap_or_default();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ztunnel_condition(state: &State) -> Result<(), String> {
    let live = |(_, session): (_, &Session)| session.stage() == Stage::Live;
    if state.sessions().greeted().any(live) {
        return Ok(());
    }
    Err(NO_ZTUNNEL.to_owned())
}
