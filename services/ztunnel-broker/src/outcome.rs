//! Decides whether an add has succeeded and, if not, why.

use std::time::{Duration, Instant};

use inpod_types::{PodUid, Revision, SandboxRef, Workload};

use crate::{
    desired::Entry,
    next_message::Target,
    session::{AddStatus, Session, SessionInputs, Stage},
    sessions::{SessionId, Sessions},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    pub sandbox: SandboxRef,
    pub uid: PodUid,
    pub revision: Revision,
    pub target: Target,
}

impl Awaited {
    pub fn new(workload: &Workload, netns: inpod_types::NetnsId) -> Self {
        Self {
            sandbox: workload.sandbox.clone(),
            uid: workload.uid.clone(),
            revision: workload.revision,
            target: Target {
                netns,
                info: workload.info.clone(),
            },
        }
    }

    /// Returns whether an entry is the awaited workload. Compares the netns and the info, too.
    pub fn matches(&self, entry: &Entry) -> bool {
        let workload = entry.workload();
        workload.sandbox == self.sandbox
            && workload.uid == self.uid
            && workload.revision == self.revision
            && workload.info == self.target.info
            && workload.netns == Some(self.target.netns)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unserved {
    #[error("a newer change of the workload arrived meanwhile")]
    Superseded,
    #[error("no ztunnel has connected since the broker started")]
    NeverConnected,
    #[error("ztunnel was lost {} s ago ({why}) and has not come back", .ago.as_secs())]
    Lost { ago: Duration, why: String },
    #[error("ztunnel is connected, but its snapshot is not finished")]
    SnapshotUnfinished,
    #[error("ztunnel did not acknowledge the workload in time")]
    Silent,
    #[error(
        "ztunnel's connection ended {times} times in a row while a message about the pod was unanswered (last cause: {cause}); the next attempt is in {} s",
        .retry_in.as_secs()
    )]
    Quarantined {
        times: u32,
        cause: String,
        retry_in: Duration,
    },
    #[error("ztunnel refused the workload: {0}")]
    Refused(String),
    #[error("the broker is being stopped")]
    Stopping,
}

/// The session that serves the workload, or the reason why no session does.
pub type Outcome = Result<SessionId, Unserved>;

/// The state that decides the outcome of an add.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    pub inputs: SessionInputs<'a>,
    pub sessions: &'a Sessions,
}

/// Decides an add as soon as possible: on the first positive acknowledgement, the last refusal, a quarantine of the
/// pod, or a newer change.
pub fn decide(evidence: &Evidence<'_>, awaited: &Awaited, now: Instant) -> Option<Outcome> {
    let current = evidence.inputs.desired.current(&awaited.uid);
    if !current.is_some_and(|entry| awaited.matches(entry)) {
        return Some(Err(Unserved::Superseded));
    }
    let statuses: Vec<_> = statuses(evidence.sessions, awaited, now).collect();
    let added =
        |(id, status): &(SessionId, AddStatus)| matches!(status, AddStatus::Added).then_some(*id);
    if let Some(id) = statuses.iter().find_map(added) {
        return Some(Ok(id));
    }
    let sent = statuses.iter().any(|(_, it)| matches!(it, AddStatus::Sent));
    if let Some(quarantine) = quarantined_everywhere(evidence, awaited, now).filter(|_| !sent) {
        return Some(Err(quarantine));
    }
    let refusals: Option<Vec<_>> = statuses.iter().map(|(_, it)| refusal(it)).collect();
    let refusals = refusals.filter(|refusals| !refusals.is_empty())?;
    Some(Err(Unserved::Refused(refusals.join("; "))))
}

/// Returns the shortest quarantine if every session has the pod in quarantine.
fn quarantined_everywhere(
    evidence: &Evidence<'_>,
    awaited: &Awaited,
    now: Instant,
) -> Option<Unserved> {
    let of = |(_, session): (_, &Session)| {
        let by = session.ztunnel();
        let suspicion = evidence
            .inputs
            .quarantine
            .suspicion(&awaited.uid, by)?
            .clone();
        Some((suspicion.quarantined_until(now)?, suspicion))
    };
    let all: Option<Vec<_>> = evidence.sessions.greeted().map(of).collect();
    let (until, suspicion) = all?.into_iter().min_by_key(|(until, _)| *until)?;
    Some(Unserved::Quarantined {
        times: suspicion.times,
        cause: suspicion.cause,
        retry_in: until.saturating_duration_since(now),
    })
}

/// Returns why an undecided add ran out of time.
pub fn timeout_cause(sessions: &Sessions, awaited: &Awaited, now: Instant) -> Unserved {
    let statuses: Vec<_> = statuses(sessions, awaited, now).collect();
    if statuses.is_empty() {
        return no_ztunnel(sessions, now);
    }
    if let Some(refusal) = statuses.iter().find_map(|(_, it)| refusal(it)) {
        return Unserved::Refused(refusal.to_owned());
    }
    let sent = statuses.iter().any(|(_, it)| matches!(it, AddStatus::Sent));
    let live = sessions.greeted().any(|(_, it)| it.stage() == Stage::Live);
    if sent || live {
        Unserved::Silent
    } else {
        Unserved::SnapshotUnfinished
    }
}

fn no_ztunnel(sessions: &Sessions, now: Instant) -> Unserved {
    sessions
        .lost()
        .map_or(Unserved::NeverConnected, |lost| Unserved::Lost {
            ago: now.saturating_duration_since(lost.at),
            why: lost.why.clone(),
        })
}

fn statuses(
    sessions: &Sessions,
    awaited: &Awaited,
    now: Instant,
) -> impl Iterator<Item = (SessionId, AddStatus)> {
    sessions.greeted().map(move |(id, session)| {
        let status = session.add_status(&awaited.uid, &awaited.target, now);
        (id, status)
    })
}

fn refusal(status: &AddStatus) -> Option<&str> {
    match status {
        AddStatus::Refused(nack) => Some(&nack.message),
        AddStatus::Added | AddStatus::Sent | AddStatus::Queued => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fixture::{descriptor, workload},
        nack::Nack,
        peer::Peer,
        pending::Ticket,
        state::State,
    };

    const REFUSAL: &str = "failure to start proxy : in use";

    struct Broker {
        state: State,
        now: Instant,
    }

    impl Broker {
        /// No pod is desired.
        fn new() -> Self {
            let now = Instant::now();
            let mut state = State::new(Duration::from_secs(10));
            state.set(Revision(1), Vec::new(), now);
            Self { state, now }
        }

        fn greeted(&mut self, pid: i32) -> SessionId {
            let id = self.state.connect(Peer::from_pid(pid), self.now);
            self.state.hello(id, self.now);
            id
        }

        fn live(&mut self, pid: i32) -> SessionId {
            let id = self.greeted(pid);
            self.answer(id, "");
            id
        }

        /// Sends the next message; an empty answer is an acknowledgement.
        fn answer(&mut self, id: SessionId, error: &str) {
            self.state.next(id, self.now).unwrap();
            self.state.ack(id, Nack::parse(error), self.now).unwrap();
        }

        fn add(&mut self) -> Ticket {
            let workload = workload("c", "p", 1, 2);
            let ticket = self.state.add(workload, descriptor(1), self.now);
            ticket.unwrap()
        }

        fn time_out(&mut self, ticket: &Ticket) -> Unserved {
            assert_eq!(*ticket.outcome.borrow(), None);
            self.state.outcome(ticket, self.now).unwrap_err()
        }
    }

    #[test]
    fn an_add_succeeds_with_the_first_acknowledgement_and_fails_with_the_last_refusal() {
        for last in ["", REFUSAL] {
            let mut broker = Broker::new();
            let (one, other) = (broker.live(1), broker.live(2));
            let ticket = broker.add();
            broker.answer(one, REFUSAL);
            assert_eq!(*ticket.outcome.borrow(), None, "the other may take it");
            broker.answer(other, last);
            let expected = if last.is_empty() {
                Ok(other)
            } else {
                Err(Unserved::Refused(format!("{REFUSAL}; {REFUSAL}")))
            };
            assert_eq!(*ticket.outcome.borrow(), Some(expected));
        }
    }

    #[test]
    fn an_add_that_runs_out_of_time_fails_with_the_cause() {
        let mut broker = Broker::new();
        let ticket = broker.add();
        assert_eq!(broker.time_out(&ticket), Unserved::NeverConnected);

        let mut broker = Broker::new();
        let lost = broker.live(1);
        let ticket = broker.add();
        broker.state.disconnect(lost, "it crashed", broker.now);
        broker.now += Duration::from_secs(3);
        let (ago, why) = (Duration::from_secs(3), "it crashed".to_owned());
        assert_eq!(broker.time_out(&ticket), Unserved::Lost { ago, why });

        let mut broker = Broker::new();
        broker.greeted(1);
        let ticket = broker.add();
        assert_eq!(broker.time_out(&ticket), Unserved::SnapshotUnfinished);

        let mut broker = Broker::new();
        let starting = broker.greeted(1);
        let ticket = broker.add();
        broker.state.next(starting, broker.now).unwrap();
        assert_eq!(broker.time_out(&ticket), Unserved::Silent);

        let mut broker = Broker::new();
        broker.live(1);
        let ticket = broker.add();
        assert_eq!(broker.time_out(&ticket), Unserved::Silent);

        let mut broker = Broker::new();
        let (one, _silent) = (broker.live(1), broker.live(2));
        let ticket = broker.add();
        broker.answer(one, REFUSAL);
        let refused = Unserved::Refused(REFUSAL.to_owned());
        assert_eq!(broker.time_out(&ticket), refused);
    }
}
