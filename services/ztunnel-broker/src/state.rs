//! The broker's state without sockets and clocks: the desired set, each ztunnel's acknowledged
//! state, and waiting adds.

mod views;

use std::time::{Duration, Instant};

use inpod_types::{PodUid, Revision, SandboxRef, Workload};

use crate::{
    descriptors::Descriptor,
    desired::{ChangeError, Changes, Desired},
    message::Message,
    nack::Nack,
    next_message::PodState,
    outcome::{self, Awaited, Evidence, Outcome, Unserved},
    peer::Peer,
    pending::{PendingAdds, Ticket},
    quarantine::Quarantine,
    session::{Answered, Record, Session, SessionEnd, SessionInputs},
    session_view::{self, SessionView},
    sessions::{SessionId, Sessions, Slot},
};

#[derive(Debug)]
pub struct State {
    desired: Desired,
    sessions: Sessions,
    quarantine: Quarantine,
    /// Set when a pod was cleared of suspicion, so that other sessions have to be woken to add the pod.
    cleared: bool,
    pending: PendingAdds,
    events: Vec<SessionView>,
    ack_timeout: Duration,
    stopping: bool,
}

impl State {
    /// Starts without a desired set. Sessions that are silent for `ack_timeout` are closed.
    pub fn new(ack_timeout: Duration) -> Self {
        Self {
            desired: Desired::default(),
            sessions: Sessions::default(),
            quarantine: Quarantine::default(),
            cleared: false,
            pending: PendingAdds::default(),
            events: Vec::new(),
            ack_timeout,
            stopping: false,
        }
    }

    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    pub fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    pub fn take_events(&mut self) -> Vec<SessionView> {
        std::mem::take(&mut self.events)
    }

    pub fn set(&mut self, revision: Revision, all: Vec<Workload>, now: Instant) {
        let changes = self.desired.set(revision, all, now);
        self.queue(&changes, now);
    }

    /// Adds a workload, which stays desired whatever the outcome, until the workload is removed or a set lacks it. The
    /// ticket receives the outcome.
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision is.
    pub fn add(
        &mut self,
        workload: Workload,
        descriptor: Descriptor,
        now: Instant,
    ) -> Result<Ticket, ChangeError> {
        let awaited = Awaited::new(&workload, descriptor.netns());
        let changes = self.desired.add(workload, descriptor, now)?;
        for session in self.sessions.iter_mut() {
            changes.keys().for_each(|uid| session.queue_urgent(uid));
            session.retry_now(&awaited.uid, now);
        }
        let ticket = self.pending.wait(awaited);
        self.decide_on(
            |uid| changes.contains_key(uid) || *uid == ticket.awaited.uid,
            now,
        );
        Ok(ticket)
    }

    /// Returns the outcome of an add, or the reason why none was reached until now.
    pub fn outcome(&self, ticket: &Ticket, now: Instant) -> Outcome {
        let outcome = ticket.outcome.borrow().clone();
        outcome.unwrap_or_else(|| Err(outcome::timeout_cause(&self.sessions, &ticket.awaited, now)))
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
    ) -> Result<(), ChangeError> {
        let changes = self.desired.remove(sandbox, revision)?;
        self.queue_urgent(&changes, now);
        Ok(())
    }

    pub fn store(&mut self, sandbox: &SandboxRef, descriptor: Descriptor, now: Instant) {
        let changes = self.desired.store(sandbox, descriptor);
        self.queue(&changes, now);
    }

    fn queue(&mut self, changes: &Changes, now: Instant) {
        for session in self.sessions.iter_mut() {
            changes.keys().for_each(|uid| session.queue(uid));
        }
        self.publish(changes, now);
    }

    fn queue_urgent(&mut self, changes: &Changes, now: Instant) {
        for session in self.sessions.iter_mut() {
            changes.keys().for_each(|uid| session.queue_urgent(uid));
        }
        self.publish(changes, now);
    }

    fn publish(&mut self, changes: &Changes, now: Instant) {
        self.decide_on(|uid| changes.contains_key(uid), now);
    }

    pub fn connect(&mut self, peer: Peer, now: Instant) -> SessionId {
        let id = self.sessions.open(Slot {
            session: Session::new(peer.ztunnel(), self.ack_timeout, now),
            peer,
            since: now,
        });
        self.report_session(id);
        id
    }

    /// Starts the snapshot of a ztunnel.
    pub fn hello(&mut self, id: SessionId, now: Instant) {
        if let Some(slot) = self.sessions.get_mut(id) {
            slot.session.on_hello(&self.desired);
        }
        self.report_session(id);
        self.decide(now);
    }

    pub fn next(&mut self, id: SessionId, now: Instant) -> Option<Message> {
        let session = &mut self.sessions.get_mut(id)?.session;
        let inputs = SessionInputs {
            desired: &self.desired,
            quarantine: &self.quarantine,
        };
        (!self.stopping)
            .then(|| session.next(inputs, now))
            .flatten()
    }

    /// Handles a response and returns the workload of the answered message.
    ///
    /// # Errors
    ///
    /// If no later response of this session can be trusted.
    pub fn ack(
        &mut self,
        id: SessionId,
        answer: Result<(), Nack>,
        now: Instant,
    ) -> Result<Answered, SessionEnd> {
        let Some(slot) = self.sessions.get_mut(id) else {
            return Ok(None);
        };
        let answered = slot.session.on_ack(answer, now)?;
        match &answered {
            Some((uid, _)) => {
                if slot.session.record_of(uid).is_some_and(was_added) {
                    self.cleared |= self.quarantine.clear(uid);
                }
                self.decide_on(|decided| decided == uid, now);
            }
            None => {
                self.report_session(id);
                self.decide(now);
            }
        }
        Ok(answered)
    }

    /// Returns whether a pod was cleared of suspicion since the last call. Other sessions may wait for the end of the
    /// suspicion.
    pub fn take_cleared(&mut self) -> bool {
        std::mem::take(&mut self.cleared)
    }

    pub fn on_send_failed(&mut self, id: SessionId) {
        if let Some(slot) = self.sessions.get_mut(id) {
            slot.session.on_send_failed();
        }
    }

    /// Returns when the session has to be checked even if nothing happens.
    pub fn wake_at(&self, id: SessionId) -> Option<Instant> {
        self.sessions.get(id)?.session.wake_at(self.inputs())
    }

    /// Checks the session's deadline.
    ///
    /// # Errors
    ///
    /// If the ztunnel was silent for too long.
    pub fn check_deadline(&self, id: SessionId, now: Instant) -> Result<(), SessionEnd> {
        let slot = self.sessions.get(id);
        slot.map_or(Ok(()), |slot| slot.session.check_deadline(now))
    }

    /// Closes a session and records a loss against the pod in flight.
    pub fn disconnect(&mut self, id: SessionId, why: &str, now: Instant) {
        if let Some(slot) = self.sessions.close(id, why, now) {
            if let Some((uid, during)) = slot.session.suspect().filter(|_| !self.stopping) {
                let ztunnel = slot.session.ztunnel();
                self.quarantine.record_loss(uid, ztunnel, during, why, now);
            }
            let view = SessionView {
                stage: None,
                ..session_view::session(id, &slot)
            };
            self.events.push(view);
        }
        self.decide(now);
    }

    fn decide(&mut self, now: Instant) {
        self.decide_on(|_| true, now);
    }

    fn decide_on(&mut self, is_concerned: impl Fn(&PodUid) -> bool, now: Instant) {
        let evidence = Evidence {
            inputs: SessionInputs {
                desired: &self.desired,
                quarantine: &self.quarantine,
            },
            sessions: &self.sessions,
        };
        self.pending.decide(&evidence, is_concerned, now);
    }

    pub(super) fn inputs(&self) -> SessionInputs<'_> {
        SessionInputs {
            desired: &self.desired,
            quarantine: &self.quarantine,
        }
    }

    /// Stops sending messages, while ztunnels keep serving their pods.
    pub fn stop(&mut self) {
        self.stopping = true;
        self.pending.stop();
    }

    pub fn check_running(&self) -> Result<(), Unserved> {
        if self.stopping {
            return Err(Unserved::Stopping);
        }
        Ok(())
    }
}

/// Returns whether the ztunnel has answered an Add and kept the connection.
fn was_added(record: &Record) -> bool {
    matches!(record.state, PodState::Added(_) | PodState::Refused(_))
}

#[cfg(test)]
mod tests;
