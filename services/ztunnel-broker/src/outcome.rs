//! Decides whether an add has succeeded and, if not, why.

use std::time::{Duration, Instant};

use inpod_proto::ztunnelbroker::v1::{SessionPhase, WorkloadPhase};
use inpod_types::{Failure, Reason, Workload};

use crate::{
    next_message::PodState,
    session::{Session, SessionId},
    state::{Lost, State},
};

/// A stock ztunnel waits at most 15 s between two attempts to connect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(15);

/// Decides an add as soon as possible: on the first positive acknowledgement, on a newer change, or once every ztunnel
/// has refused the pod or has the pod in quarantine. Returns the serving session, or the reason for the failure; `None`
/// while the outcome is open.
pub fn decide(
    state: &State,
    workload: &Workload,
    now: Instant,
) -> Option<Result<SessionId, Failure>> {
    if state.is_stopping() {
        let message = "the broker is being stopped";
        return Some(Err(Failure::new(Reason::DependencyUnavailable, message)));
    }
    let current = state.desired().current(&workload.uid);
    let Some(current) = current.filter(|current| current.workload == *workload) else {
        let message = "a newer change of the workload arrived meanwhile";
        return Some(Err(Failure::new(Reason::RevisionStale, message)));
    };
    let phases: Vec<_> = state.phases(current, now).collect();
    let mut added = phases.iter().filter(|(_, it)| *it == WorkloadPhase::Added);
    if let Some((id, _)) = added.next() {
        return Some(Ok(*id));
    }
    let is_over = |it| matches!(it, WorkloadPhase::Refused | WorkloadPhase::Quarantined);
    if phases.is_empty() || !phases.iter().all(|(_, phase)| is_over(*phase)) {
        return None;
    }
    refused(state, workload)
        .or_else(|| quarantined(state, workload, now))
        .map(Err)
}

/// Returns why an undecided add ran out of time.
pub fn timeout_cause(state: &State, workload: &Workload, now: Instant) -> Failure {
    if state.greeted().next().is_none() {
        return no_ztunnel(state.lost(), now);
    }
    if let Some(refused) = refused(state, workload) {
        return refused;
    }
    let is_sent = |it: &Session| it.suspect().is_some_and(|(uid, _)| *uid == workload.uid);
    let is_live = |it: &Session| it.phase() == SessionPhase::Live;
    let mut sessions = state.greeted();
    if sessions.any(|(_, session)| is_sent(session) || is_live(session)) {
        let message = "ztunnel did not acknowledge the workload in time";
        return Failure::new(Reason::ZtunnelSilent, message);
    }
    let message = "ztunnel is connected, but its snapshot is not finished";
    Failure::new(Reason::ZtunnelSnapshotUnfinished, message)
}

/// Returns ztunnels' refusals of the workload.
fn refused(state: &State, workload: &Workload) -> Option<Failure> {
    let refusals =
        state.greeted().filter_map(
            |(_, session)| match &session.record_of(&workload.uid)?.state {
                PodState::Refused(it) if Some(it.target.netns) == workload.netns => {
                    Some(it.nack.message.as_str())
                }
                PodState::Refused(_)
                | PodState::Added(_)
                | PodState::Kept
                | PodState::Cleared(_) => None,
            },
        );
    let refusals: Vec<_> = refusals.collect();
    let message = format!("ztunnel refused the workload: {}", refusals.join("; "));
    (!refusals.is_empty()).then(|| Failure::new(Reason::ZtunnelRefused, message))
}

/// Returns the quarantine that ends first.
fn quarantined(state: &State, workload: &Workload, now: Instant) -> Option<Failure> {
    let (uid, quarantine) = (&workload.uid, &state.inputs().quarantine);
    let ends = state
        .greeted()
        .filter_map(|(_, session)| quarantine.quarantined_until(uid, &session.peer.ztunnel, now));
    let wait = ends.min()?.saturating_duration_since(now);
    let suspicion = quarantine.suspicion(uid)?;
    let message = format!(
        "ztunnel's connection ended {} times in a row while a message about the pod was unanswered (last cause: {}); the next attempt is in {} s",
        suspicion.times,
        suspicion.cause,
        wait.as_secs()
    );
    Some(Failure::new(Reason::ZtunnelQuarantined, message).retry_after(wait))
}

fn no_ztunnel(lost: Option<&Lost>, now: Instant) -> Failure {
    let Some(Lost { at, why }) = lost else {
        let message = "no ztunnel has connected since the broker started";
        return Failure::new(Reason::ZtunnelNeverConnected, message);
    };
    let ago = now.saturating_duration_since(*at);
    let message = format!(
        "ztunnel was lost {} s ago ({why}) and has not come back",
        ago.as_secs()
    );
    Failure::new(Reason::ZtunnelLost, message).retry_after(MAX_RECONNECT_DELAY.saturating_sub(ago))
}

#[cfg(test)]
mod tests {
    use inpod_service::Readiness;
    use inpod_types::Revision;

    use super::*;
    use crate::{
        fixture::{descriptor, workload},
        nack::Nack,
        peer::Peer,
    };

    const REFUSAL: &str = "failure to start proxy : in use";

    /// Answers the next message of a session; an empty answer is an acknowledgement.
    fn answer(state: &mut State, id: SessionId, error: &str) {
        let now = Instant::now();
        state.next(id, now).0.unwrap();
        state.ack(id, Nack::parse(error), now).unwrap();
    }

    #[test]
    fn an_add_succeeds_with_the_first_acknowledgement_and_fails_with_the_last_refusal() {
        for last in ["", REFUSAL] {
            let now = Instant::now();
            let mut state = State::new(Duration::from_secs(10), Readiness::default());
            state.set(Revision(1), Vec::new(), now);
            let [one, other] = [1, 2].map(|pid| {
                let id = state.connect(Peer::from_pid(pid), now);
                state.hello(id, now);
                answer(&mut state, id, "");
                id
            });
            let workload = workload("c", "p", 1, 2);
            let added = state.add(workload.clone(), descriptor(1), now);
            let waits = added.unwrap();
            let mut events = state.events();
            answer(&mut state, one, REFUSAL);
            assert_eq!(events.try_recv().unwrap().refused, 1);
            let decided = decide(&state, &workload, now);
            assert_eq!(decided, None, "the other may take it");
            let cause = timeout_cause(&state, &workload, now);
            assert_eq!(cause.reason, Reason::ZtunnelRefused);
            answer(&mut state, other, last);
            let decided = decide(&state, &workload, now).unwrap();
            let expected = if last.is_empty() {
                Ok(other)
            } else {
                let message = format!("ztunnel refused the workload: {REFUSAL}; {REFUSAL}");
                Err(Failure::new(Reason::ZtunnelRefused, message))
            };
            assert_eq!(decided, expected);
            drop(waits);
        }
    }
}
