//! A ztunnel's session without the socket: acknowledged state, next message, and the meaning of responses.
//!
//! The session is level-triggered: a pod's next message follows from the acknowledged and the desired state of the pod.
//! A change that was reverted in time costs nothing. Only a change of a pod moves the pod in the queue, so a message
//! costs the same beside any number of pods.

use std::{
    collections::BTreeSet,
    fmt,
    time::{Duration, Instant},
};

use inpod_proto::ztunnelbroker::v1::{SessionPhase, WorkloadPhase};
use inpod_types::{Backoff, PodUid};

use crate::{
    desired::{Desired, Entry},
    message::{Message, Snapshot},
    nack::Nack,
    next_message::{self, Action, PodState, Refusal, Target},
    peer::Peer,
    quarantine::{LostDuring, Quarantine},
    queue::{Lane, Queue},
    records::{Record, Records},
    waits::Waits,
};

/// The delays before a refused workload is retried.
const RETRY: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));

/// The ID of a session, unique and ascending within a run of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The end of a session, as far as its messages are concerned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The peer may not be a ztunnel.
    #[error("it sent no hello within {} s", .0.as_secs())]
    NoHello(Duration),
    /// Acknowledgements carry no ID, so after a missing acknowledgement every later response would be credited to the
    /// wrong pod.
    #[error("it did not acknowledge a message within {} s", .0.as_secs())]
    Silent(Duration),
    /// Because responses carry no ID, nothing after a surplus response can be trusted.
    #[error("it sent a response without a request")]
    Unsolicited,
    /// Only a new session can bring the ztunnel in sync.
    #[error("it refused to {verb}: {}", .nack.message)]
    Refused { verb: &'static str, nack: Nack },
}

#[derive(Debug)]
enum Phase {
    Connected,
    Snapshot(Snapshot),
    /// The end of the snapshot is in flight.
    Ending,
    Live,
}

#[derive(Debug)]
struct InFlight {
    subject: Subject,
    since: Instant,
}

#[derive(Debug)]
enum Subject {
    Add(PodUid, Target),
    Keep(PodUid),
    Del(PodUid),
    SnapshotSent,
}

impl Subject {
    fn uid(&self) -> Option<&PodUid> {
        match self {
            Self::Add(uid, _) | Self::Keep(uid) | Self::Del(uid) => Some(uid),
            Self::SnapshotSent => None,
        }
    }
}

/// The state shared by all sessions.
#[derive(Debug, Default)]
pub struct Inputs {
    pub desired: Desired,
    /// The suspected pods: sent last, or not at all for now.
    pub quarantine: Quarantine,
    /// The pods for which callers wait.
    pub waits: Waits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub acknowledged: u64,
    pub refused: u64,
}

#[derive(Debug)]
pub struct Session {
    pub peer: Peer,
    pub since: Instant,
    pub counts: Counts,
    phase: Phase,
    ack_timeout: Duration,
    records: Records,
    queue: Queue,
    /// The pods of the snapshot without a message: desired at the hello, or in a set since. Suspected pods may be left
    /// out.
    unnamed: BTreeSet<PodUid>,
    in_flight: Option<InFlight>,
}

impl Session {
    /// Creates a session. `ack_timeout` limits the wait for the hello and for each response.
    pub fn new(peer: Peer, ack_timeout: Duration, now: Instant) -> Self {
        Self {
            peer,
            since: now,
            phase: Phase::Connected,
            ack_timeout,
            records: Records::default(),
            queue: Queue::default(),
            unnamed: BTreeSet::new(),
            counts: Counts::default(),
            in_flight: None,
        }
    }

    /// Starts the snapshot of the desired pods.
    pub fn on_hello(&mut self, inputs: &Inputs, now: Instant) {
        if matches!(self.phase, Phase::Connected) {
            self.phase = Phase::Snapshot(Snapshot::open());
            let pods = inputs.desired.pods().map(|(uid, _)| uid.clone());
            self.on_set(&pods.collect(), inputs, now);
        }
    }

    /// Handles a set, with all pods whose workloads may have changed. A snapshot in progress names the pods, too.
    pub fn on_set(&mut self, pods: &BTreeSet<PodUid>, inputs: &Inputs, now: Instant) {
        if matches!(self.phase, Phase::Snapshot(_)) {
            self.unnamed.extend(pods.iter().cloned());
        }
        let revision = |uid: &PodUid| Some(inputs.desired.current(uid)?.workload.revision);
        let mut pods: Vec<_> = pods.iter().collect();
        pods.sort_by_key(|uid| (!inputs.waits.contains(uid), revision(uid)));
        for uid in pods {
            self.on_change(uid, inputs, now);
        }
    }

    /// Handles an add by a caller: even a refused pod is sent again at once.
    pub fn on_add(&mut self, uid: &PodUid, inputs: &Inputs, now: Instant) {
        if let Some(PodState::Refused(refusal)) = self.records.state(uid) {
            let refusal = Refusal {
                retry_at: now,
                ..refusal.clone()
            };
            self.records.set(uid, Some(PodState::Refused(refusal)), now);
        }
        self.on_change(uid, inputs, now);
    }

    /// Decides a pod's place in the queue anew. While a message about the pod is in flight, the answer decides.
    pub fn on_change(&mut self, uid: &PodUid, inputs: &Inputs, now: Instant) {
        let subject = self.in_flight.as_ref().and_then(|it| it.subject.uid());
        if !self.is_greeted() || subject == Some(uid) {
            return;
        }
        let wanted = inputs.desired.current(uid);
        if wanted.is_none() || self.records.get(uid).is_some() {
            self.unnamed.remove(uid);
        }
        let lane = self.lane(uid, wanted, inputs, now);
        self.queue.place(uid, lane);
        let is_forgotten = wanted.is_none() && lane.is_none();
        if is_forgotten && matches!(self.records.state(uid), Some(PodState::Refused(_))) {
            self.records.set(uid, None, now);
        }
    }

    /// Decides the lane of a pod's next message; `None` if no message about the pod is due.
    fn lane(
        &self,
        uid: &PodUid,
        wanted: Option<&Entry>,
        inputs: &Inputs,
        now: Instant,
    ) -> Option<Lane> {
        let is_unnamed = self.unnamed.contains(uid);
        let deferral = inputs.quarantine.deferral(uid, &self.peer.ztunnel);
        match next_message::decide(self.records.state(uid), wanted, now) {
            Action::Nothing => None,
            Action::Del => Some(Lane::Del),
            Action::Keep => {
                let may_keep = is_unnamed && deferral.is_none_or(|it| it.may_keep);
                may_keep.then_some(Lane::Keep)
            }
            Action::Add => Some(match deferral {
                // The snapshot names the pod, so that a ztunnel already serving it continues.
                Some(deferral) if is_unnamed && deferral.may_keep => Lane::Keep,
                Some(_) => Lane::Suspected,
                None if is_unnamed => Lane::Name,
                None if inputs.waits.contains(uid) => Lane::Awaited,
                None => Lane::Add,
            }),
        }
    }

    pub fn phase(&self) -> SessionPhase {
        match self.phase {
            Phase::Connected => SessionPhase::Connected,
            Phase::Snapshot(_) | Phase::Ending => SessionPhase::Snapshot,
            Phase::Live => SessionPhase::Live,
        }
    }

    /// Returns whether the ztunnel has sent its hello.
    pub fn is_greeted(&self) -> bool {
        !matches!(self.phase, Phase::Connected)
    }

    /// Returns the number of pods that the ztunnel serves, according to its acknowledgements.
    pub fn serves(&self) -> usize {
        self.records.served()
    }

    /// Returns the number of pods about which a message is to be sent.
    pub fn queued(&self, inputs: &Inputs, now: Instant) -> usize {
        let suspected = self.queue.of(Lane::Suspected);
        let waiting = suspected.filter(|uid| !self.is_due(uid, inputs, now));
        self.queue.pods() - waiting.count()
    }

    pub fn record_of(&self, uid: &PodUid) -> Option<&Record> {
        self.records.get(uid)
    }

    /// Returns the phase of a desired workload in this session.
    pub fn workload_phase(
        &self,
        wanted: &Entry,
        quarantine: &Quarantine,
        now: Instant,
    ) -> WorkloadPhase {
        let uid = &wanted.workload.uid;
        if self.suspect() == Some((uid, LostDuring::Add)) {
            return WorkloadPhase::Sent;
        }
        let phase = next_message::phase(self.records.state(uid), wanted, now);
        // A Del stops the pod before the answer arrives.
        let is_deleting = |it: &InFlight| matches!(&it.subject, Subject::Del(of) if of == uid);
        let is_deleting = self.in_flight.as_ref().is_some_and(is_deleting);
        let is_acknowledged = matches!(phase, WorkloadPhase::Added | WorkloadPhase::Kept);
        let phase = if is_acknowledged && is_deleting {
            WorkloadPhase::Queued
        } else {
            phase
        };
        let is_served = matches!(phase, WorkloadPhase::Added | WorkloadPhase::Kept);
        let quarantine = quarantine.quarantined_until(uid, &self.peer.ztunnel, now);
        quarantine
            .filter(|_| !is_served)
            .map_or(phase, |_| WorkloadPhase::Quarantined)
    }

    /// Returns the next message. Returns no message while another is in flight, before the hello, or before the desired
    /// set is known.
    pub fn next(&mut self, inputs: &Inputs, now: Instant) -> Option<Message> {
        if self.in_flight.is_some() || !self.is_greeted() || !inputs.desired.is_seeded() {
            return None;
        }
        self.take_due_retries(inputs, now);
        let (subject, message) = match self.end_snapshot() {
            Some(end) => end,
            None => self.take(inputs, now)?,
        };
        self.in_flight = Some(InFlight {
            subject,
            since: now,
        });
        Some(message)
    }

    fn take_due_retries(&mut self, inputs: &Inputs, now: Instant) {
        while let Some(uid) = self.records.take_due(now) {
            self.on_change(&uid, inputs, now);
        }
    }

    /// Takes the next pod from the queue.
    fn take(&mut self, inputs: &Inputs, now: Instant) -> Option<(Subject, Message)> {
        let may_keep = self.queue.is_lane_empty(Lane::Name) && inputs.desired.may_keep(now);
        let next = self.queue.next(may_keep);
        let (lane, uid) = next.or_else(|| {
            let mut suspected = self.queue.of(Lane::Suspected);
            let due = suspected.find(|uid| self.is_due(uid, inputs, now))?;
            Some((Lane::Suspected, due))
        })?;
        let uid = uid.clone();
        let taken = self.message(lane, &uid, inputs.desired.current(&uid))?;
        self.queue.place(&uid, None);
        self.queue.served(lane);
        self.unnamed.remove(&uid);
        Some(taken)
    }

    /// Checks the lane of every pod. A caller that stops waiting changes no lane.
    #[cfg(test)]
    pub(crate) fn check_queue(&mut self, inputs: &Inputs, now: Instant) {
        self.take_due_retries(inputs, now);
        let subject = self.in_flight.as_ref().and_then(|it| it.subject.uid());
        let pods = inputs.desired.pods().map(|(uid, _)| uid);
        let pods = pods.chain(self.records.uids());
        for uid in pods.filter(|uid| self.is_greeted() && subject != Some(uid)) {
            let expected = self.lane(uid, inputs.desired.current(uid), inputs, now);
            let lane = self.queue.lane_of(uid);
            let is_left = (lane, expected) == (Some(Lane::Awaited), Some(Lane::Add));
            assert!(
                lane == expected || is_left,
                "{uid}: {lane:?}, not {expected:?}"
            );
        }
    }

    /// Returns whether a suspected pod may be sent: after the snapshot, and once its quarantine is over.
    fn is_due(&self, uid: &PodUid, inputs: &Inputs, now: Instant) -> bool {
        let deferral = inputs.quarantine.deferral(uid, &self.peer.ztunnel);
        matches!(self.phase, Phase::Live) && deferral.is_none_or(|it| it.due <= now)
    }

    fn message(
        &self,
        lane: Lane,
        uid: &PodUid,
        wanted: Option<&Entry>,
    ) -> Option<(Subject, Message)> {
        match (lane, &self.phase) {
            (Lane::Del, _) => Some((Subject::Del(uid.clone()), Message::del(uid))),
            (Lane::Keep, Phase::Snapshot(snapshot)) => {
                Some((Subject::Keep(uid.clone()), snapshot.keep(uid)))
            }
            (Lane::Keep, Phase::Connected | Phase::Ending | Phase::Live) => None,
            (Lane::Awaited | Lane::Name | Lane::Add | Lane::Suspected, _) => {
                let descriptor = wanted?.descriptor.clone()?;
                let target = Target::of(wanted?)?;
                let message = Message::add(uid, &target.info, descriptor);
                Some((Subject::Add(uid.clone(), target), message))
            }
        }
    }

    /// Ends the snapshot once the pods in `unnamed` are named.
    fn end_snapshot(&mut self) -> Option<(Subject, Message)> {
        let is_named = self.queue.is_lane_empty(Lane::Name) && self.queue.is_lane_empty(Lane::Keep);
        if !is_named || !matches!(self.phase, Phase::Snapshot(_)) {
            return None;
        }
        self.unnamed.clear();
        match std::mem::replace(&mut self.phase, Phase::Ending) {
            Phase::Snapshot(snapshot) => Some((Subject::SnapshotSent, snapshot.end())),
            Phase::Connected | Phase::Ending | Phase::Live => None,
        }
    }

    /// Handles the response to the message in flight. Returns the pod of the message; `None` for the end of the
    /// snapshot.
    ///
    /// # Errors
    ///
    /// If nothing was in flight, or if a refusal leaves the ztunnel in an unknown state. The message then remains
    /// in flight, see [`Self::suspect`].
    pub fn on_ack(
        &mut self,
        answer: Result<(), Nack>,
        inputs: &Inputs,
        now: Instant,
    ) -> Result<Option<PodUid>, SessionEnd> {
        let in_flight = self.in_flight.take().ok_or(SessionEnd::Unsolicited)?;
        self.counts.acknowledged += u64::from(answer.is_ok());
        self.counts.refused += u64::from(answer.is_err());
        if let Err(end) = check(&in_flight.subject, &answer) {
            self.in_flight = Some(in_flight);
            return Err(end);
        }
        let (uid, state) = match in_flight.subject {
            Subject::Add(uid, target) => {
                let state = match answer {
                    Ok(()) => PodState::Added(target),
                    Err(nack) => self.refused(&uid, target, nack, now),
                };
                (uid, Some(state))
            }
            Subject::Keep(uid) => (uid, Some(PodState::Kept)),
            Subject::Del(uid) => {
                let state = self.deleted(&uid);
                (uid, state)
            }
            Subject::SnapshotSent => {
                self.go_live(inputs, now);
                return Ok(None);
            }
        };
        self.records.set(&uid, state, now);
        self.on_change(&uid, inputs, now);
        Ok(Some(uid))
    }

    fn refused(&self, uid: &PodUid, target: Target, nack: Nack, now: Instant) -> PodState {
        let before = match self.records.state(uid) {
            Some(PodState::Refused(before)) if before.target == target => before.times,
            Some(_) | None => 0,
        };
        PodState::Refused(Refusal {
            target,
            nack,
            times: before.saturating_add(1),
            pending: true,
            retry_at: now + RETRY.delay(before),
        })
    }

    /// Returns the state of a pod after its Del.
    fn deleted(&self, uid: &PodUid) -> Option<PodState> {
        let during_snapshot = !matches!(self.phase, Phase::Live);
        match self.records.state(uid)? {
            PodState::Refused(refusal) => Some(PodState::Refused(Refusal {
                pending: false,
                ..refusal.clone()
            })),
            PodState::Added(target) if during_snapshot => {
                Some(PodState::Cleared(target.info.clone()))
            }
            PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
        }
    }

    /// ztunnel has now stopped the pods that the snapshot did not name, so pods deleted in the snapshot can be added
    /// again.
    fn go_live(&mut self, inputs: &Inputs, now: Instant) {
        self.phase = Phase::Live;
        for uid in self.records.take_cleared() {
            self.on_change(&uid, inputs, now);
        }
    }

    /// Returns when [`Self::check_deadline`] or, after a call at `now`, [`Self::next`] has to be called even if nothing
    /// happens.
    pub fn wake_at(&self, inputs: &Inputs, now: Instant) -> Option<Instant> {
        if let Some(deadline) = self.deadline() {
            return Some(deadline);
        }
        let later = if matches!(self.phase, Phase::Live) {
            inputs.quarantine.next_due(now)
        } else {
            inputs.desired.fetch_deadline()
        };
        let retry = self.records.next_retry();
        retry.into_iter().chain(later).filter(|at| *at > now).min()
    }

    /// Returns when the hello or the response must have arrived.
    fn deadline(&self) -> Option<Instant> {
        let waits_since = match (&self.phase, &self.in_flight) {
            (Phase::Connected, _) => Some(self.since),
            (_, in_flight) => in_flight.as_ref().map(|in_flight| in_flight.since),
        };
        Some(waits_since? + self.ack_timeout)
    }

    /// Fails if the session has to be closed.
    ///
    /// # Errors
    ///
    /// If the ztunnel was silent for too long.
    pub fn check_deadline(&self, now: Instant) -> Result<(), SessionEnd> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Ok(());
        }
        Err(match self.phase {
            Phase::Connected => SessionEnd::NoHello(self.ack_timeout),
            Phase::Snapshot(_) | Phase::Ending | Phase::Live => {
                SessionEnd::Silent(self.ack_timeout)
            }
        })
    }

    /// Drops the message in flight: the message was not sent, so its pod did not cause the end of the session.
    pub fn on_send_failed(&mut self) {
        self.in_flight = None;
    }

    /// Returns the pod of the unanswered Add or Keep.
    pub fn suspect(&self) -> Option<(&PodUid, LostDuring)> {
        match &self.in_flight.as_ref()?.subject {
            Subject::Add(uid, _) => Some((uid, LostDuring::Add)),
            Subject::Keep(uid) => Some((uid, LostDuring::Keep)),
            Subject::Del(_) | Subject::SnapshotSent => None,
        }
    }
}

/// Accepts only refusals of an Add after which ztunnel keeps the connection.
fn check(subject: &Subject, answer: &Result<(), Nack>) -> Result<(), SessionEnd> {
    let Err(nack) = answer else {
        return Ok(());
    };
    let verb = match subject {
        Subject::Add(..) if !nack.ends_session() => return Ok(()),
        Subject::Add(..) => "add a pod",
        Subject::Keep(_) => "keep a pod",
        Subject::Del(_) => "delete a pod",
        Subject::SnapshotSent => "end the snapshot",
    };
    let nack = nack.clone();
    Err(SessionEnd::Refused { verb, nack })
}

#[cfg(test)]
mod tests;
