//! The broker's state without sockets and clocks: the desired set, each ztunnel's acknowledged
//! state, and waiting adds.

mod views;

use std::time::{Duration, Instant};

use inpod_types::{PodUid, Revision, SandboxRef, Workload};

use crate::{
    descriptors::Descriptor,
    desired::{ChangeError, Changes, Desired, Entry},
    message::Message,
    nack::Nack,
    next_message::PodState,
    outcome::{self, Awaited, Evidence, Outcome, Unserved},
    peer::Peer,
    pending::{PendingAdds, Ticket, Undo},
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
        for workload in &all {
            self.pending.confirm(&workload.sandbox, workload.revision);
        }
        let changes = self.desired.set(revision, all, now);
        self.queue(&changes, now);
    }

    /// Adds a workload; the ticket receives the outcome.
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
        self.desired.check_add(&workload)?;
        let awaited = Awaited::new(&workload, descriptor.netns());
        let desired = self.desired.get(&workload.sandbox);
        let (undo, changes) = if desired.is_some_and(|entry| awaited.matches(entry)) {
            let changes = self.desired.store(&workload.sandbox, descriptor);
            (Undo::Nothing, changes)
        } else {
            let (previous, changes) = self.desired.add(workload, descriptor, now)?;
            (Undo::Restore(previous.map(Box::new)), changes)
        };
        for session in self.sessions.iter_mut() {
            changes.keys().for_each(|uid| session.queue_urgent(uid));
            session.retry_now(&awaited.uid, now);
        }
        let ticket = self.pending.join(awaited, undo);
        self.decide_on(|uid| *uid == ticket.awaited.uid, now);
        self.publish(&changes, now);
        Ok(ticket)
    }

    /// Ends a wait and returns the current outcome. If no caller was answered with success, the set is restored and the
    /// sessions bring the ztunnels back to the restored set.
    pub fn finish_add(&mut self, ticket: &Ticket, now: Instant) -> Outcome {
        let outcome = ticket.outcome.borrow().clone();
        let outcome = outcome
            .unwrap_or_else(|| Err(outcome::timeout_cause(&self.sessions, &ticket.awaited, now)));
        self.stop_waiting(ticket, outcome.is_ok(), now);
        outcome
    }

    /// Ends the wait of a gone caller.
    pub fn abandon_add(&mut self, ticket: &Ticket, now: Instant) {
        self.stop_waiting(ticket, false, now);
    }

    fn stop_waiting(&mut self, ticket: &Ticket, served: bool, now: Instant) {
        let undo = self.pending.leave(ticket, served);
        let Undo::Restore(previous) = undo else {
            return;
        };
        let sandbox = &ticket.awaited.sandbox;
        let unchanged = |entry: &Entry| ticket.awaited.matches(entry);
        if !self.stopping && self.desired.get(sandbox).is_some_and(unchanged) {
            let changes = self.desired.restore(sandbox, previous.map(|entry| *entry));
            self.queue_urgent(&changes, now);
        }
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

    fn decide(&self, now: Instant) {
        self.decide_on(|_| true, now);
    }

    fn decide_on(&self, is_concerned: impl Fn(&PodUid) -> bool, now: Instant) {
        let evidence = Evidence {
            inputs: self.inputs(),
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
