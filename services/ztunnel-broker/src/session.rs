//! One ztunnel's session, without its socket: what it was told, what it is told next, and what its answers mean.
//!
//! It is level-triggered. The queue only says where to look; what is sent follows from what the ztunnel was told and
//! what is desired at that moment, so that a change which came and went costs nothing.

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

/// Why a session is over, as far as its messages go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// It never said who it is. It may be anything.
    #[error("it sent no hello within {} s", .0.as_secs())]
    NoHello(Duration),
    /// Acknowledgements have no number: after a missing one, every later one would be credited to the wrong pod.
    #[error("it did not acknowledge a message within {} s", .0.as_secs())]
    Silent(Duration),
    /// Somebody wants it told anew.
    #[error("it was closed by RenewSession to resend the whole set")]
    Renewed,
    /// For the same reason nothing after an answer too many can be believed.
    #[error("it sent a response without a request")]
    Unsolicited,
    /// It can be brought in step by a new session only.
    #[error("it refused to {verb}: {}", .nack.message)]
    Refused {
        /// What it was to do.
        verb: &'static str,
        /// What it said.
        nack: Nack,
    },
}

/// How far a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No hello yet.
    Connected,
    /// Being told the desired set, or waiting for one.
    Snapshot,
    /// Its snapshot is acknowledged.
    Live,
}

/// What an answer was about; `None` for the end of the snapshot.
pub type Answered = Option<(PodUid, SandboxRef)>;

#[derive(Debug)]
enum Phase {
    Connected,
    Snapshot(Snapshot),
    Ending,
    Live,
}

/// What a ztunnel knows of a pod, since when, and by which sandbox.
#[derive(Clone, Debug)]
pub struct Record {
    /// What it knows.
    pub state: PodState,
    /// The sandbox that was meant.
    pub sandbox: SandboxRef,
    /// When it answered.
    pub answered: Instant,
}

/// The one message that waits for its answer.
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

/// What a session is measured against.
#[derive(Clone, Copy, Debug)]
pub struct SessionInputs<'a> {
    /// What ztunnels are to serve.
    pub desired: &'a Desired,
    /// Whom they are told of last, or not for now.
    pub quarantine: &'a Quarantine,
}

/// What a ztunnel has said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many messages it acknowledged.
    pub acknowledged: u64,
    /// How many it refused.
    pub refused: u64,
}

/// A ztunnel's session.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    ztunnel: Ztunnel,
    since: Instant,
    ack_timeout: Duration,
    records: BTreeMap<PodUid, Record>,
    queue: Queue,
    /// What a Keep is the best that can be said of, told after everything else of the snapshot.
    keeps: BTreeSet<PodUid>,
    retries: BTreeSet<(Instant, PodUid)>,
    /// Suspects that are to be added, when nothing else is left to be told.
    deferred: BTreeSet<PodUid>,
    counts: Counts,
    /// How many pods it serves by its own word.
    serves: usize,
    /// It has answered since it was last found to be owed nothing.
    busy: bool,
    in_flight: Option<InFlight>,
    /// Somebody asked for it to be closed.
    renewed: bool,
}

impl Session {
    /// A ztunnel that has connected, and has `patience` to say hello and to acknowledge each message.
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
            busy: false,
            in_flight: None,
            renewed: false,
        }
    }

    /// It said hello: its snapshot begins. Live changes are taken from here on.
    pub fn on_hello(&mut self, desired: &Desired) {
        if matches!(self.phase, Phase::Connected) {
            self.phase = Phase::Snapshot(Snapshot::open());
            desired.uids().for_each(|uid| self.queue.push(uid));
        }
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Connected => Stage::Connected,
            Phase::Snapshot(_) | Phase::Ending => Stage::Snapshot,
            Phase::Live => Stage::Live,
        }
    }

    /// Have it closed by [`Self::on_time`].
    pub fn renew(&mut self) {
        self.renewed = true;
    }

    /// Somebody waits for this pod: look at it before the rest.
    pub fn queue_urgent(&mut self, uid: &PodUid) {
        self.queue.push_urgent(uid);
    }

    /// Look at this pod when there is time.
    pub fn queue(&mut self, uid: &PodUid) {
        self.queue.push(uid);
    }

    /// Somebody asks for this pod anew: an earlier refusal is not held against it.
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

    /// The next message, if one is due: none while another waits for its answer, before the hello, or before anybody
    /// said what is desired.
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

    /// Keeps come last, so that descriptors which arrive meanwhile still make Adds of them; then the end.
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

    /// A pod of which this ztunnel was told nothing yet, and to keep which is the best that can be said.
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
