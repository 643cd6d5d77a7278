//! The broker's state without sockets: the desired set, each ztunnel's acknowledged state, and who waits for changes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use inpod_proto::ztunnelbroker::v1::{self as wire, SessionPhase, WorkloadPhase};
use inpod_service::Readiness;
use inpod_types::{Failure, PodUid, Revision, SandboxRef, Workload};
use tokio::sync::{broadcast, watch};

use crate::{
    descriptors::Descriptor,
    desired::{Desired, Entry},
    message::Message,
    nack::Nack,
    next_message::PodState,
    peer::Peer,
    records::Record,
    session::{Inputs, Session, SessionEnd, SessionId},
    view,
};

/// The number of changes of sessions that a watcher may lag behind.
const MAX_WATCHER_LAG: usize = 256;

/// The condition that the desired set is known. The broker sends ztunnels nothing before.
const SEEDED: &str = "desired-set";

const ZTUNNEL: &str = "ztunnel";
const NO_ZTUNNEL: &str = "no ztunnel has acknowledged its snapshot";

/// The last loss of a ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    pub at: Instant,
    pub why: String,
}

#[derive(Debug)]
pub struct State {
    inputs: Inputs,
    sessions: BTreeMap<SessionId, Session>,
    opened: u64,
    lost: Option<Lost>,
    stopping: bool,
    ack_timeout: Duration,
    /// Notifies sessions of every change that may concern them.
    changed: watch::Sender<()>,
    events: broadcast::Sender<wire::Session>,
    conditions: Readiness,
}

impl State {
    /// Starts without a desired set. Sessions that are silent for `ack_timeout` are closed. `conditions` receives the
    /// state of readiness.
    pub fn new(ack_timeout: Duration, conditions: Readiness) -> Self {
        conditions.require(SEEDED, "pod-events has not sent the desired set");
        conditions.set(ZTUNNEL, Err(NO_ZTUNNEL.to_owned()));
        Self {
            inputs: Inputs::default(),
            sessions: BTreeMap::new(),
            opened: 0,
            lost: None,
            stopping: false,
            ack_timeout,
            changed: watch::Sender::new(()),
            events: broadcast::Sender::new(MAX_WATCHER_LAG),
            conditions,
        }
    }

    /// Returns the state shared by all sessions.
    pub fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    pub fn desired(&self) -> &Desired {
        &self.inputs.desired
    }

    pub fn sessions(&self) -> &BTreeMap<SessionId, Session> {
        &self.sessions
    }

    /// Checks the queue of every session.
    #[cfg(test)]
    fn check_queues(&mut self, now: Instant) {
        for session in self.sessions.values_mut() {
            session.check_queue(&self.inputs, now);
        }
    }

    pub fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Notifies of every change that may concern a session.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Receives each session at the start, at a change of the phase, at a refused workload, and at the end.
    pub fn events(&self) -> broadcast::Receiver<wire::Session> {
        self.events.subscribe()
    }

    /// Returns the phase of a desired workload in each ztunnel that has sent its hello.
    pub fn phases<'a>(
        &'a self,
        wanted: &'a Entry,
        now: Instant,
    ) -> impl Iterator<Item = (SessionId, WorkloadPhase)> + 'a {
        self.greeted().map(move |(id, session)| {
            let phase = session.workload_phase(wanted, &self.inputs.quarantine, now);
            (id, phase)
        })
    }

    pub fn greeted(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        let sessions = self.sessions.iter().map(|(id, session)| (*id, session));
        sessions.filter(|(_, session)| session.is_greeted())
    }

    pub fn set(&mut self, revision: Revision, all: Vec<Workload>, now: Instant) {
        let changed = self.inputs.desired.set(revision, all, now);
        for session in self.sessions.values_mut() {
            session.on_set(&changed, &self.inputs, now);
        }
        self.conditions.set(SEEDED, Ok(()));
        self.changed.send_replace(());
        self.inputs.waits.wake_all();
    }

    /// Adds a workload, which stays desired until the workload is removed or a set lacks it. The receiver is notified
    /// when the outcome has to be decided anew (see [`crate::outcome`]).
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision is.
    pub fn add(
        &mut self,
        workload: Workload,
        descriptor: Descriptor,
        now: Instant,
    ) -> Result<watch::Receiver<()>, Failure> {
        let uid = workload.uid.clone();
        let before = self.pod_of(&workload.sandbox);
        self.inputs.desired.add(workload, descriptor, now)?;
        for changed in before.iter().chain([&uid]) {
            self.inputs.waits.wake(changed);
        }
        let waits = self.inputs.waits.subscribe(&uid);
        for session in self.sessions.values_mut() {
            session.on_add(&uid, &self.inputs, now);
        }
        if let Some(uid) = before {
            self.update_sessions(&uid, now);
        }
        self.changed.send_replace(());
        Ok(waits)
    }

    /// Makes every session decide about a changed pod.
    fn update_sessions(&mut self, uid: &PodUid, now: Instant) {
        for session in self.sessions.values_mut() {
            session.on_change(uid, &self.inputs, now);
        }
        self.changed.send_replace(());
    }

    /// Removes a workload from the set.
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision is.
    pub fn remove(
        &mut self,
        sandbox: &SandboxRef,
        revision: Revision,
        now: Instant,
    ) -> Result<(), Failure> {
        let uid = self.pod_of(sandbox);
        self.inputs.desired.remove(sandbox, revision)?;
        if let Some(uid) = uid {
            self.inputs.waits.wake(&uid);
            self.update_sessions(&uid, now);
        }
        Ok(())
    }

    fn pod_of(&self, sandbox: &SandboxRef) -> Option<PodUid> {
        let entry = self.inputs.desired.get(sandbox)?;
        Some(entry.workload.uid.clone())
    }

    pub fn store(&mut self, sandbox: &SandboxRef, descriptor: Descriptor, now: Instant) {
        if let Some(uid) = self.inputs.desired.store(sandbox, descriptor) {
            self.update_sessions(&uid, now);
        }
    }

    pub fn connect(&mut self, peer: Peer, now: Instant) -> SessionId {
        self.opened += 1;
        let id = SessionId(self.opened);
        self.sessions
            .insert(id, Session::new(peer, self.ack_timeout, now));
        self.report(id, now);
        id
    }

    /// Starts the snapshot of a ztunnel.
    pub fn hello(&mut self, id: SessionId, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.on_hello(&self.inputs, now);
        }
        self.report(id, now);
        self.inputs.waits.wake_all();
    }

    /// Returns the next message of a session, and when to ask again even if nothing happens.
    pub fn next(&mut self, id: SessionId, now: Instant) -> (Option<Message>, Option<Instant>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|_| !self.stopping) else {
            return (None, None);
        };
        let message = session.next(&self.inputs, now);
        (message, session.wake_at(&self.inputs, now))
    }

    /// Handles a response.
    ///
    /// # Errors
    ///
    /// If no later response of this session can be trusted.
    pub fn ack(
        &mut self,
        id: SessionId,
        answer: Result<(), Nack>,
        now: Instant,
    ) -> Result<(), SessionEnd> {
        let Some(session) = self.sessions.get_mut(&id) else {
            return Ok(());
        };
        let is_refusal = answer.is_err();
        let Some(uid) = session.on_ack(answer, &self.inputs, now)? else {
            self.report(id, now);
            self.inputs.waits.wake_all();
            return Ok(());
        };
        let is_cleared = session.record_of(&uid).is_some_and(was_added);
        if is_cleared && self.inputs.quarantine.clear(&uid) {
            // Other sessions may wait for the end of the suspicion.
            self.update_sessions(&uid, now);
        }
        self.inputs.waits.wake(&uid);
        if is_refusal {
            self.report(id, now);
        }
        Ok(())
    }

    pub fn on_send_failed(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.on_send_failed();
        }
    }

    /// Checks the session's deadline.
    ///
    /// # Errors
    ///
    /// If the ztunnel was silent for too long.
    pub fn check_deadline(&self, id: SessionId, now: Instant) -> Result<(), SessionEnd> {
        let session = self.sessions.get(&id);
        session.map_or(Ok(()), |session| session.check_deadline(now))
    }

    /// Closes a session and records a loss against the pod in flight. A session without a hello may not have been a
    /// ztunnel and does not count as lost.
    pub fn disconnect(&mut self, id: SessionId, why: &str, now: Instant) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        if session.is_greeted() {
            let why = why.to_owned();
            self.lost = Some(Lost { at: now, why });
        }
        if let Some((uid, during)) = session.suspect().filter(|_| !self.stopping) {
            self.inputs
                .quarantine
                .record_loss(uid, &session.peer.ztunnel, during, why, now);
            self.update_sessions(uid, now);
        }
        self.publish(id, &session, SessionPhase::Closed, now);
        self.inputs.waits.wake_all();
    }

    fn report(&self, id: SessionId, now: Instant) {
        if let Some(session) = self.sessions.get(&id) {
            self.publish(id, session, session.phase(), now);
        }
    }

    fn publish(&self, id: SessionId, session: &Session, phase: SessionPhase, now: Instant) {
        let mut is_live = self.sessions.values().map(Session::phase);
        let is_live = is_live.any(|phase| phase == SessionPhase::Live);
        let found = is_live.then_some(()).ok_or_else(|| NO_ZTUNNEL.to_owned());
        self.conditions.set(ZTUNNEL, found);
        let queued = session.queued(&self.inputs, now);
        // Without watchers, nothing is sent.
        drop(self.events.send(view::session(id, session, phase, queued)));
    }

    /// Stops sending messages, while ztunnels keep serving their pods, and ends all waits.
    pub fn stop(&mut self) {
        self.stopping = true;
        self.changed.send_replace(());
        self.inputs.waits.wake_all();
    }
}

/// Returns whether the ztunnel has answered an Add and kept the connection.
fn was_added(record: &Record) -> bool {
    matches!(record.state, PodState::Added(_) | PodState::Refused(_))
}

#[cfg(test)]
mod tests;
