//! A ztunnel's session without the socket: acknowledged state, next message, and the meaning of responses.
//!
//! The session is level-triggered: the queue only holds the pods to examine, and the message follows from the
//! acknowledged and the desired state at that moment. A change that was reverted in time costs nothing.

mod add_status;
mod answer;
mod deadlines;
mod deferred;

pub use add_status::AddStatus;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use inpod_types::{PodUid, SandboxRef};

use crate::{
    desired::{Desired, Entry},
    message::{Message, Snapshot},
    nack::Nack,
    next_message::{self, Action, PodState, Target},
    peer::Ztunnel,
    quarantine::Quarantine,
    queue::Queue,
};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Connected,
    /// Receiving the desired set, or waiting until it is known.
    Snapshot,
    Live,
}

/// The workload that a response was about; `None` for SnapshotSent.
pub type Answered = Option<(PodUid, SandboxRef)>;

#[derive(Debug)]
enum Phase {
    Connected,
    Snapshot(Snapshot),
    Ending,
    Live,
}

/// The state of a pod according to a ztunnel's acknowledgements.
#[derive(Clone, Debug)]
pub struct Record {
    pub state: PodState,
    pub sandbox: SandboxRef,
    pub answered: Instant,
}

#[derive(Debug)]
struct InFlight {
    subject: Subject,
    since: Instant,
}

#[derive(Clone, Debug)]
enum Subject {
    Add {
        uid: PodUid,
        sandbox: SandboxRef,
        target: Target,
        refused_before: u32,
    },
    Keep(PodUid, SandboxRef),
    Del(PodUid, SandboxRef),
    SnapshotSent,
}

#[derive(Clone, Copy, Debug)]
pub struct SessionInputs<'a> {
    pub desired: &'a Desired,
    /// The suspected pods, which are sent last or not at all for now.
    pub quarantine: &'a Quarantine,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub acknowledged: u64,
    pub refused: u64,
}

#[derive(Debug)]
pub struct Session {
    phase: Phase,
    ztunnel: Ztunnel,
    since: Instant,
    ack_timeout: Duration,
    records: BTreeMap<PodUid, Record>,
    queue: Queue,
    /// Pods for which only a Keep is possible. The Keeps are sent after everything else in the snapshot.
    keeps: BTreeSet<PodUid>,
    retries: BTreeSet<(Instant, PodUid)>,
    /// Suspected pods to add once nothing else is left to send.
    deferred: BTreeSet<PodUid>,
    counts: Counts,
    serves: usize,
    in_flight: Option<InFlight>,
}

impl Session {
    /// Creates a session. `ack_timeout` limits the wait for the hello and for each response.
    pub fn new(ztunnel: Ztunnel, ack_timeout: Duration, now: Instant) -> Self {
        Self {
            ztunnel,
            phase: Phase::Connected,
            since: now,
            ack_timeout,
            records: BTreeMap::new(),
            queue: Queue::default(),
            keeps: BTreeSet::new(),
            retries: BTreeSet::new(),
            deferred: BTreeSet::new(),
            counts: Counts::default(),
            serves: 0,
            in_flight: None,
        }
    }

    /// Starts the snapshot; from then on, live changes are queued.
    pub fn on_hello(&mut self, desired: &Desired) {
        if matches!(self.phase, Phase::Connected) {
            self.phase = Phase::Snapshot(Snapshot::open());
            desired.uids().for_each(|uid| self.queue.push(uid));
        }
    }

    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Connected => Stage::Connected,
            Phase::Snapshot(_) | Phase::Ending => Stage::Snapshot,
            Phase::Live => Stage::Live,
        }
    }

    /// Queues a pod for which a caller waits.
    pub fn queue_urgent(&mut self, uid: &PodUid) {
        self.queue.push_urgent(uid);
    }

    pub fn queue(&mut self, uid: &PodUid) {
        self.queue.push(uid);
    }

    /// Queues a pod that a caller adds again, and ignores its earlier refusal.
    pub fn retry_now(&mut self, uid: &PodUid, now: Instant) {
        if let Some(Record {
            state: PodState::Refused(refusal),
            ..
        }) = self.records.get_mut(uid)
        {
            refusal.retry_at = now;
        }
        self.queue.push_urgent(uid);
    }

    /// Returns the next message. Returns no message while another is in flight, before the hello, or before the desired
    /// set is known.
    pub fn next(&mut self, inputs: SessionInputs<'_>, now: Instant) -> Option<Message> {
        let ready = self.in_flight.is_none() && !matches!(self.phase, Phase::Connected);
        if !ready || !inputs.desired.is_seeded() {
            return None;
        }
        self.queue_retries(now);
        self.queue_cleared(inputs);
        let (subject, message) = self
            .next_change(inputs, now)
            .or_else(|| self.next_of_snapshot(inputs, now))
            .or_else(|| self.next_deferred(inputs, now))?;
        self.in_flight = Some(InFlight {
            subject,
            since: now,
        });
        Some(message)
    }

    fn queue_retries(&mut self, now: Instant) {
        while let Some((at, uid)) = self.retries.pop_first() {
            if at > now {
                self.retries.insert((at, uid));
                return;
            }
            self.queue.push(&uid);
        }
    }

    fn next_change(
        &mut self,
        inputs: SessionInputs<'_>,
        now: Instant,
    ) -> Option<(Subject, Message)> {
        while let Some(uid) = self.queue.pop() {
            let change = self.change(uid, inputs, now);
            if change.is_some() {
                return change;
            }
        }
        None
    }

    fn change(
        &mut self,
        uid: PodUid,
        inputs: SessionInputs<'_>,
        now: Instant,
    ) -> Option<(Subject, Message)> {
        let wanted = inputs.desired.current(&uid);
        match self.decide(&uid, wanted, now) {
            Action::Nothing => None,
            Action::Forget => {
                self.records.remove(&uid);
                None
            }
            Action::Keep => {
                self.keeps.insert(uid);
                None
            }
            Action::Add if self.deferral(&uid, inputs).is_some() => {
                self.defer(uid);
                None
            }
            Action::Add => self.add(uid, wanted?),
            Action::Del => {
                let record = self.records.get(&uid)?;
                Some(del(uid, record))
            }
        }
    }

    fn decide(&self, uid: &PodUid, wanted: Option<&Entry>, now: Instant) -> Action {
        let state = self.records.get(uid).map(|record| &record.state);
        next_message::decide(state, wanted, now)
    }

    /// Returns the next message of the snapshot. Keeps come after all Adds, because a descriptor that arrives meanwhile
    /// still allows an Add. The end of the snapshot comes last.
    fn next_of_snapshot(
        &mut self,
        inputs: SessionInputs<'_>,
        now: Instant,
    ) -> Option<(Subject, Message)> {
        let Phase::Snapshot(snapshot) = &self.phase else {
            self.keeps.clear();
            return None;
        };
        if !inputs.desired.may_keep(now) {
            return None;
        }
        while let Some(uid) = self.keeps.pop_first() {
            if let Some(entry) = self.keepable(&uid, inputs) {
                let sandbox = entry.workload().sandbox.clone();
                return Some((Subject::Keep(uid.clone(), sandbox), snapshot.keep(uid)));
            }
        }
        self.end_snapshot()
    }

    /// Returns the entry of a pod that was not sent yet and for which a Keep is the best message.
    fn keepable<'a>(&self, uid: &PodUid, inputs: SessionInputs<'a>) -> Option<&'a Entry> {
        let entry = inputs.desired.current(uid)?;
        let deferral = self.deferral(uid, inputs);
        let best = entry.descriptor().is_none() || deferral.is_some();
        let harmless = deferral.is_none_or(|it| it.may_keep);
        (best && harmless && !self.records.contains_key(uid)).then_some(entry)
    }

    fn end_snapshot(&mut self) -> Option<(Subject, Message)> {
        match std::mem::replace(&mut self.phase, Phase::Ending) {
            Phase::Snapshot(snapshot) => Some((Subject::SnapshotSent, snapshot.end())),
            other @ (Phase::Connected | Phase::Ending | Phase::Live) => {
                self.phase = other;
                None
            }
        }
    }

    fn add(&self, uid: PodUid, entry: &Entry) -> Option<(Subject, Message)> {
        let descriptor = entry.descriptor()?.clone();
        let target = Target::of(entry)?;
        let refused_before = match self.records.get(&uid).map(|record| &record.state) {
            Some(PodState::Refused(refusal)) if refusal.target == target => refusal.times,
            Some(_) | None => 0,
        };
        let message = Message::add(uid.clone(), target.info.clone(), descriptor);
        let subject = Subject::Add {
            uid,
            sandbox: entry.workload().sandbox.clone(),
            target,
            refused_before,
        };
        Some((subject, message))
    }
}

fn del(uid: PodUid, record: &Record) -> (Subject, Message) {
    let message = Message::del(uid.clone());
    (Subject::Del(uid, record.sandbox.clone()), message)
}

#[cfg(test)]
mod tests;
