use inpod_proto::ztunnelbroker::v1::{Suspicion, Workload};

use super::*;
use crate::testing::sandbox;

const REFUSED: &str = "failure to start proxy: AddrInUse";

fn session(phase: SessionPhase) -> Session {
    Session {
        phase: phase.into(),
        ..Session::default()
    }
}

fn state(phase: WorkloadPhase, error: &str) -> WorkloadState {
    WorkloadState {
        phase: phase.into(),
        error: error.to_owned(),
        ..WorkloadState::default()
    }
}

/// Returns the broker's report on the sandbox `c1`.
fn report(sessions: &[SessionPhase], states: Vec<WorkloadState>) -> ListWorkloadsResponse {
    ListWorkloadsResponse {
        instance_id: "run".to_owned(),
        seeded: true,
        workloads: vec![WorkloadStatus {
            workload: Some(Workload {
                sandbox: Some((&sandbox("c1")).into()),
                ..Workload::default()
            }),
            states,
            suspicion: Some(Suspicion {
                cause: "it closed the connection".to_owned(),
                ..Suspicion::default()
            }),
            ..WorkloadStatus::default()
        }],
        sessions: sessions.iter().map(|phase| session(*phase)).collect(),
    }
}

#[test]
fn one_ztunnel_that_serves_is_enough_and_all_have_to_refuse() {
    use SessionPhase::{Connected, Live, Snapshot};
    use WorkloadPhase::{Added, Kept, Quarantined, Queued, Refused, Sent};

    let refused = || state(Refused, REFUSED);
    // While a refused pod is sent again, the last answer counts.
    let retried = || state(Queued, REFUSED);
    let waiting = || state(Sent, "");
    let quarantined = || state(Quarantined, "");
    for (sessions, states, expected) in [
        (&[Live][..], vec![state(Added, "")], None),
        (&[Live], vec![state(Kept, "")], None),
        (&[Live, Live], vec![refused(), state(Added, "")], None),
        (
            &[Live],
            vec![refused()],
            Some((Reason::ZtunnelRefused, true)),
        ),
        (
            &[Live],
            vec![retried()],
            Some((Reason::ZtunnelRefused, true)),
        ),
        (
            &[Live, Live],
            vec![refused(), waiting()],
            Some((Reason::ZtunnelRefused, false)),
        ),
        (
            &[Live],
            vec![quarantined()],
            Some((Reason::ZtunnelQuarantined, true)),
        ),
        (
            &[Live],
            vec![waiting()],
            Some((Reason::ZtunnelSilent, false)),
        ),
        (
            &[Snapshot],
            vec![waiting()],
            Some((Reason::ZtunnelSnapshotUnfinished, false)),
        ),
        (&[Connected], vec![], Some((Reason::ZtunnelLost, false))),
        (&[], vec![], Some((Reason::ZtunnelLost, false))),
    ] {
        let all = report(sessions, states);
        let judged = judge(all.workloads.first(), &all.sessions, true).err();
        let judged = judged.map(|unserved| (unserved.failure.reason, unserved.is_final));
        assert_eq!(judged, expected, "{all:?}");
    }
}

#[test]
fn a_failure_quotes_ztunnel() {
    let message = |phase, error| {
        let all = report(&[SessionPhase::Live], vec![state(phase, error)]);
        let judged = judge(all.workloads.first(), &all.sessions, true);
        judged.unwrap_err().failure.message
    };
    assert!(message(WorkloadPhase::Refused, REFUSED).contains(REFUSED));
    let quarantined = message(WorkloadPhase::Quarantined, "");
    assert!(
        quarantined.contains("it closed the connection"),
        "{quarantined}"
    );
}

#[test]
fn a_missing_acknowledgement_is_a_failure_after_a_while() {
    let enrolled = [sandbox("c1")].into();
    let waiting = || vec![state(WorkloadPhase::Sent, "")];
    let added = || vec![state(WorkloadPhase::Added, "")];
    let mut tracker = Tracker::default();
    let began = Instant::now();
    let mut failures = |seconds, was_connected, sessions: &[SessionPhase], states| {
        let (all, now) = (
            report(sessions, states),
            began + Duration::from_secs(seconds),
        );
        let failures = tracker.update(&enrolled, &all, was_connected, now);
        let reasons = failures.into_values().map(|failure| failure.reason);
        (reasons.collect::<Vec<_>>(), tracker.has_unserved())
    };
    let live = [SessionPhase::Live];
    // No ztunnel has connected to this run of the broker yet.
    assert_eq!(failures(0, false, &[], vec![]), (vec![], true));
    assert_eq!(failures(19, false, &[], vec![]), (vec![], true));
    let never = vec![Reason::ZtunnelNeverConnected];
    assert_eq!(failures(20, false, &[], vec![]), (never, true));
    assert_eq!(failures(21, true, &live, added()), (vec![], false));
    // The ztunnel is lost, comes back, and answers late.
    assert_eq!(failures(30, true, &[], vec![]), (vec![], true));
    let lost = vec![Reason::ZtunnelLost];
    assert_eq!(failures(40, true, &[], vec![]), (lost, true));
    let silent = vec![Reason::ZtunnelSilent];
    assert_eq!(failures(41, true, &live, waiting()), (silent, true));
    assert_eq!(failures(42, true, &live, added()), (vec![], false));
}

#[test]
fn a_connection_counts_until_the_next_run_of_the_broker() {
    let run = |id: &str| Event::InstanceId(id.to_owned());
    let mut announcements = Announcements::default();
    let mut was_connected = |event| {
        let before = announcements.clone();
        announcements.count(&event);
        assert_ne!(announcements, before, "each event is a change");
        announcements.was_connected
    };
    assert!(!was_connected(run("1")));
    assert!(!was_connected(Event::Session(session(
        SessionPhase::Connected
    ))));
    assert!(was_connected(Event::Session(session(
        SessionPhase::Snapshot
    ))));
    assert!(was_connected(Event::Session(session(SessionPhase::Closed))));
    assert!(was_connected(run("1")), "the stream was opened again");
    assert!(!was_connected(run("2")));
}

#[test]
fn a_pod_that_the_broker_does_not_list_is_not_served() {
    let enrolled = [sandbox("another")].into();
    let mut tracker = Tracker::default();
    let all = report(&[SessionPhase::Live], vec![]);
    let now = Instant::now();
    assert!(tracker.update(&enrolled, &all, true, now).is_empty());
    let failures = tracker.update(&enrolled, &all, true, now + ACKNOWLEDGEMENT_TIMEOUT);
    assert_eq!(failures[&sandbox("another")].reason, Reason::ZtunnelSilent);
}
