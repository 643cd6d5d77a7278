//! A ztunnel's session without the socket: acknowledged state, next message, and the meaning of responses.
//!
//! The session is level-triggered: the next message follows from the current acknowledged and desired state of all
//! pods. A change that was reverted in time costs nothing.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use inpod_proto::ztunnelbroker::v1::{SessionPhase, WorkloadPhase};
use inpod_types::PodUid;
use itertools::Itertools as _;

use crate::{
    desired::{Desired, Entry},
    message::{Message, Snapshot},
    nack::Nack,
    next_message::{self, Action, PodState, Refusal, Target},
    peer::Peer,
    quarantine::{LostDuring, Quarantine},
    waits::Waits,
};

/// Delays before a refused workload is retried; each is twice the one before.
const INITIAL_RETRY_DELAY: Duration = Duration::from_secs(5);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

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

/// The state of a pod according to a ztunnel's acknowledgements.
#[derive(Clone, Debug)]
pub struct Record {
    pub state: PodState,
    pub answered: Instant,
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

/// The state shared by all sessions.
#[derive(Debug, Default)]
pub struct Inputs {
    pub desired: Desired,
    /// The suspected pods: sent last, or not at all for now.
    pub quarantine: Quarantine,
    /// The pods for which callers wait: sent first.
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
    records: BTreeMap<PodUid, Record>,
    in_flight: Option<InFlight>,
}

/// A possible message. The lowest rank is sent first, and of a rank the oldest revision.
#[derive(Debug)]
struct Candidate<'a> {
    rank: Rank,
    uid: &'a PodUid,
    /// The desired workload; `None` for a Del.
    wanted: Option<&'a Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// An Add for which a caller waits.
    Awaited,
    Del,
    Add,
    /// An Add of a suspected pod, which delays no other pod.
    Suspected,
    /// A Keep. A descriptor that arrives during the snapshot still allows an Add.
    Keep,
}

impl Session {
    /// Creates a session. `ack_timeout` limits the wait for the hello and for each response.
    pub fn new(peer: Peer, ack_timeout: Duration, now: Instant) -> Self {
        Self {
            peer,
            since: now,
            phase: Phase::Connected,
            ack_timeout,
            records: BTreeMap::new(),
            counts: Counts::default(),
            in_flight: None,
        }
    }

    /// Starts the snapshot.
    pub fn on_hello(&mut self) {
        if matches!(self.phase, Phase::Connected) {
            self.phase = Phase::Snapshot(Snapshot::open());
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
        let states = self.records.values().map(|record| &record.state);
        let is_served = |it: &&PodState| matches!(it, PodState::Added(_) | PodState::Kept);
        states.filter(is_served).count()
    }

    /// Returns the number of pods about which a message is to be sent.
    pub fn queued(&self, inputs: &Inputs, now: Instant) -> usize {
        let is_greeted = self.is_greeted();
        self.candidates(inputs, now).filter(|_| is_greeted).count()
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
        let state = self.records.get(uid).map(|record| &record.state);
        let phase = next_message::phase(state, wanted, now);
        let is_served = matches!(phase, WorkloadPhase::Added | WorkloadPhase::Kept);
        let quarantine = quarantine.quarantined_until(uid, &self.peer.ztunnel, now);
        quarantine
            .filter(|_| !is_served)
            .map_or(phase, |_| WorkloadPhase::Quarantined)
    }

    /// Lets a refused pod be sent at once, because a caller adds the pod again.
    pub fn retry_now(&mut self, uid: &PodUid, now: Instant) {
        if let Some(record) = self.records.get_mut(uid)
            && let PodState::Refused(refusal) = &mut record.state
        {
            refusal.retry_at = now;
        }
    }

    /// Returns the next message. Returns no message while another is in flight, before the hello, or before the desired
    /// set is known.
    pub fn next(&mut self, inputs: &Inputs, now: Instant) -> Option<Message> {
        if self.in_flight.is_some() || !self.is_greeted() || !inputs.desired.is_seeded() {
            return None;
        }
        self.forget_removed(&inputs.desired);
        let revision = |it: &Candidate<'_>| it.wanted.map(|entry| entry.workload.revision);
        let candidates = self.candidates(inputs, now);
        let first = candidates.min_by_key(|it| (it.rank, revision(it)));
        let (subject, message) = match first {
            Some(candidate) => self.message(&candidate)?,
            None => self.end_snapshot(&inputs.desired, now)?,
        };
        self.in_flight = Some(InFlight {
            subject,
            since: now,
        });
        Some(message)
    }

    /// Drops the records of refused pods that are neither desired nor retried by ztunnel.
    fn forget_removed(&mut self, desired: &Desired) {
        self.records.retain(|uid, record| match &record.state {
            PodState::Refused(refusal) => refusal.pending || desired.current(uid).is_some(),
            PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => true,
        });
    }

    /// Compares the desired with the acknowledged state of every pod, in 13 µs for 250 pods: both are ordered by UID.
    fn candidates<'a>(
        &'a self,
        inputs: &'a Inputs,
        now: Instant,
    ) -> impl Iterator<Item = Candidate<'a>> {
        let may_keep = inputs.desired.may_keep(now);
        let desired = inputs.desired.pods();
        let pods = desired.merge_join_by(&self.records, |(uid, _), (known, _)| uid.cmp(known));
        pods.filter_map(move |pod| {
            let (desired, known) = pod.left_and_right();
            let uid = desired.map(|it| it.0).or_else(|| known.map(|it| it.0))?;
            let (wanted, state) = (desired.map(|it| it.1), known.map(|it| &it.1.state));
            let rank = self.rank(uid, wanted, state, inputs, now)?;
            (rank != Rank::Keep || may_keep).then_some(Candidate { rank, uid, wanted })
        })
    }

    /// Returns the rank of a pod's next message; `None` if no message is to be sent now.
    fn rank(
        &self,
        uid: &PodUid,
        wanted: Option<&Entry>,
        state: Option<&PodState>,
        inputs: &Inputs,
        now: Instant,
    ) -> Option<Rank> {
        let action = next_message::decide(state, wanted, now);
        let deferral = inputs.quarantine.deferral(uid, &self.peer.ztunnel);
        let may_keep = !matches!(self.phase, Phase::Live) && deferral.is_none_or(|it| it.may_keep);
        match (action, deferral) {
            (Action::Nothing, _) => None,
            (Action::Del, _) => Some(Rank::Del),
            (Action::Keep, _) => may_keep.then_some(Rank::Keep),
            (Action::Add, None) if inputs.waits.contains(uid) => Some(Rank::Awaited),
            (Action::Add, None) => Some(Rank::Add),
            (Action::Add, Some(it)) if matches!(self.phase, Phase::Live) => {
                (it.due <= now).then_some(Rank::Suspected)
            }
            // The snapshot names the pod, so that a ztunnel already serving the pod continues.
            (Action::Add, Some(_)) => (state.is_none() && may_keep).then_some(Rank::Keep),
        }
    }

    fn message(&self, candidate: &Candidate<'_>) -> Option<(Subject, Message)> {
        let uid = candidate.uid.clone();
        match (candidate.rank, &self.phase) {
            (Rank::Del, _) => Some((Subject::Del(uid), Message::del(candidate.uid))),
            (Rank::Keep, Phase::Snapshot(snapshot)) => {
                Some((Subject::Keep(uid), snapshot.keep(candidate.uid)))
            }
            (Rank::Keep, Phase::Connected | Phase::Ending | Phase::Live) => None,
            (Rank::Awaited | Rank::Add | Rank::Suspected, _) => {
                let descriptor = candidate.wanted?.descriptor.clone()?;
                let target = Target::of(candidate.wanted?)?;
                let message = Message::add(candidate.uid, &target.info, descriptor);
                Some((Subject::Add(uid, target), message))
            }
        }
    }

    /// Ends the snapshot, once nothing is left to send and to fetch.
    fn end_snapshot(&mut self, desired: &Desired, now: Instant) -> Option<(Subject, Message)> {
        if !matches!(self.phase, Phase::Snapshot(_)) || !desired.may_keep(now) {
            return None;
        }
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
                self.go_live();
                return Ok(None);
            }
        };
        match state {
            Some(state) => {
                let answered = now;
                self.records.insert(uid.clone(), Record { state, answered });
            }
            None => drop(self.records.remove(&uid)),
        }
        Ok(Some(uid))
    }

    fn refused(&self, uid: &PodUid, target: Target, nack: Nack, now: Instant) -> PodState {
        let before = match self.records.get(uid).map(|record| &record.state) {
            Some(PodState::Refused(before)) if before.target == target => before.times,
            Some(_) | None => 0,
        };
        PodState::Refused(Refusal {
            target,
            nack,
            times: before.saturating_add(1),
            pending: true,
            retry_at: now + retry_after(before),
        })
    }

    /// Returns the state of a pod after its Del.
    fn deleted(&self, uid: &PodUid) -> Option<PodState> {
        let during_snapshot = !matches!(self.phase, Phase::Live);
        match &self.records.get(uid)?.state {
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
    fn go_live(&mut self) {
        self.phase = Phase::Live;
        self.records
            .retain(|_, record| !matches!(record.state, PodState::Cleared(_)));
    }

    /// Returns when [`Self::check_deadline`] or, after a call at `now`, [`Self::next`] has to be called even if nothing
    /// happens.
    pub fn wake_at(&self, inputs: &Inputs, now: Instant) -> Option<Instant> {
        if let Some(deadline) = self.deadline() {
            return Some(deadline);
        }
        let retries = self
            .records
            .values()
            .filter_map(|record| match &record.state {
                PodState::Refused(refusal) => Some(refusal.retry_at),
                PodState::Added(_) | PodState::Kept | PodState::Cleared(_) => None,
            });
        let later = if matches!(self.phase, Phase::Live) {
            inputs.quarantine.next_due(now)
        } else {
            inputs.desired.fetch_deadline()
        };
        retries.chain(later).filter(|at| *at > now).min()
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

fn retry_after(refused_before: u32) -> Duration {
    let factor = 2_u32.saturating_pow(refused_before);
    INITIAL_RETRY_DELAY
        .saturating_mul(factor)
        .min(MAX_RETRY_DELAY)
}

#[cfg(test)]
mod tests;
