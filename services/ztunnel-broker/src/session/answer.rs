use std::time::{Duration, Instant};

use inpod_types::{PodUid, SandboxRef};

use super::{Answered, Counts, Phase, Record, Session, SessionEnd, Stage, Subject};
use crate::{
    nack::Nack,
    next_message::{PodState, Refusal, Target},
};

/// Delays before a refused workload is retried; each is twice the one before.
const INITIAL_RETRY_DELAY: Duration = Duration::from_secs(5);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

impl Session {
    /// Handles the response to the message in flight.
    ///
    /// # Errors
    ///
    /// If nothing was in flight, or if a refusal leaves the ztunnel in an unknown state. The message then remains
    /// in flight, see [`Self::suspect`].
    pub fn on_ack(
        &mut self,
        answer: Result<(), Nack>,
        now: Instant,
    ) -> Result<Answered, SessionEnd> {
        let in_flight = self.in_flight.as_ref().ok_or(SessionEnd::Unsolicited)?;
        self.counts.count(&answer);
        check(&in_flight.subject, &answer)?;
        let in_flight = self.in_flight.take().ok_or(SessionEnd::Unsolicited)?;
        let answered = self.credit(in_flight.subject, answer, now);
        if let Some((uid, _)) = &answered {
            // The desired state may have changed while the message was in flight.
            self.queue.push_urgent(uid);
        }
        Ok(answered)
    }

    fn credit(&mut self, subject: Subject, answer: Result<(), Nack>, now: Instant) -> Answered {
        let (uid, sandbox, state) = match subject {
            Subject::Add {
                uid,
                sandbox,
                target,
                refused_before,
            } => {
                let state = self.added(&uid, target, answer, refused_before, now);
                (uid, sandbox, Some(state))
            }
            Subject::Keep(uid, sandbox) => (uid, sandbox, Some(PodState::Kept)),
            Subject::Del(uid, sandbox) => {
                let state = self.deleted(&uid);
                (uid, sandbox, state)
            }
            Subject::SnapshotSent => {
                self.go_live();
                return None;
            }
        };
        self.record(&uid, &sandbox, state, now);
        Some((uid, sandbox))
    }

    fn added(
        &mut self,
        uid: &PodUid,
        target: Target,
        answer: Result<(), Nack>,
        refused_before: u32,
        now: Instant,
    ) -> PodState {
        let Err(nack) = answer else {
            return PodState::Added(target);
        };
        let retry_at = now + retry_after(refused_before);
        self.retries.insert((retry_at, uid.clone()));
        PodState::Refused(Refusal {
            target,
            nack,
            times: refused_before.saturating_add(1),
            pending: true,
            retry_at,
        })
    }

    fn deleted(&self, uid: &PodUid) -> Option<PodState> {
        let during_snapshot = self.stage() == Stage::Snapshot;
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

    fn record(
        &mut self,
        uid: &PodUid,
        sandbox: &SandboxRef,
        state: Option<PodState>,
        now: Instant,
    ) {
        let serves = state.as_ref().is_some_and(is_served);
        let before = match state {
            Some(state) => {
                let record = Record {
                    state,
                    sandbox: sandbox.clone(),
                    answered: now,
                };
                self.records.insert(uid.clone(), record)
            }
            None => self.records.remove(uid),
        };
        let served = before.is_some_and(|record| is_served(&record.state));
        self.serves = (self.serves + usize::from(serves)).saturating_sub(usize::from(served));
    }

    /// ztunnel has now stopped the pods that the snapshot did not name, so pods deleted in the snapshot can be added
    /// again.
    fn go_live(&mut self) {
        self.phase = Phase::Live;
        let cleared = |(uid, record): (&PodUid, &Record)| {
            matches!(record.state, PodState::Cleared(_)).then(|| uid.clone())
        };
        let cleared: Vec<_> = self.records.iter().filter_map(cleared).collect();
        for uid in cleared {
            self.records.remove(&uid);
            self.queue.push_urgent(&uid);
        }
    }
}

fn is_served(state: &PodState) -> bool {
    match state {
        PodState::Added(_) | PodState::Kept => true,
        PodState::Refused(_) | PodState::Cleared(_) => false,
    }
}

impl Counts {
    fn count(&mut self, answer: &Result<(), Nack>) {
        match answer {
            Ok(()) => self.acknowledged += 1,
            Err(_) => self.refused += 1,
        }
    }
}

/// Accepts only refusals of an Add after which ztunnel keeps the connection.
fn check(subject: &Subject, answer: &Result<(), Nack>) -> Result<(), SessionEnd> {
    let Err(nack) = answer else {
        return Ok(());
    };
    let verb = match subject {
        Subject::Add { .. } if !nack.kind.ends_session() => return Ok(()),
        Subject::Add { .. } => "add a pod",
        Subject::Keep(_, _) => "keep a pod",
        Subject::Del(_, _) => "delete a pod",
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
