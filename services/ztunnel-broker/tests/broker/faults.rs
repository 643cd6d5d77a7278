//! Ztunnels that violate the protocol, in every way at every message. Time is virtual.
//!
//! In every case no response is credited to another pod, the caller of an add is answered in time, stock ztunnel
//! would survive every message, and the next session restores everything.

use std::{collections::BTreeSet, time::Duration};

use inpod_proto::{zds::workload_request::Payload, ztunnelbroker::v1::WorkloadPhase};
use inpod_types::Reason;
use tokio::time::{Instant, timeout};

use crate::bench::{ACK_TIMEOUT, Bench, SOON, Ztunnel, describe, workload};

/// The deadline of an add's caller: two ack timeouts and the reconnects.
const CALLER: Duration = Duration::from_secs(45);

/// A ztunnel's reaction instead of an acknowledgement.
#[derive(Clone, Copy, Debug)]
enum Fault {
    AcksAfterTheTimeout,
    NeverAcks,
    AcksTwice,
    AcksBeforeItIsTold,
    AnswersGarbage,
    AnswersHello,
    AnswersTooLong,
    SendsAnEmptyPacket,
    HangsUp,
    CannotReadIt,
    ForbidsIt,
}

const FAULTS: [Fault; 11] = [
    Fault::AcksAfterTheTimeout,
    Fault::NeverAcks,
    Fault::AcksTwice,
    Fault::AcksBeforeItIsTold,
    Fault::AnswersGarbage,
    Fault::AnswersHello,
    Fault::AnswersTooLong,
    Fault::SendsAnEmptyPacket,
    Fault::HangsUp,
    Fault::CannotReadIt,
    Fault::ForbidsIt,
];

struct Session {
    ztunnel: Ztunnel,
    complete: bool,
    acknowledged: BTreeSet<String>,
}

impl Session {
    async fn begin(bench: &Bench) -> Self {
        Self {
            ztunnel: bench.ztunnel().await,
            complete: false,
            acknowledged: BTreeSet::new(),
        }
    }

    /// Returns the next message, which stock ztunnel must survive; `None` after a while.
    async fn next(&self, time: Duration) -> Option<Payload> {
        let (payload, fds) = self.ztunnel.within(time).await?;
        let only_before = matches!(payload, Payload::Keep(_) | Payload::SnapshotSent(_));
        assert!(!(self.complete && only_before), "{payload:?}");
        let expected = usize::from(matches!(payload, Payload::Add(_)));
        assert_eq!(fds.len(), expected, "{payload:?}");
        Some(payload)
    }

    async fn acknowledge(&mut self, payload: &Payload) {
        match payload {
            Payload::Add(add) => drop(self.acknowledged.insert(add.uid.clone())),
            Payload::Del(del) => drop(self.acknowledged.remove(&del.uid)),
            Payload::SnapshotSent(_) => self.complete = true,
            Payload::Keep(_) => {}
        }
        self.ztunnel.ack().await;
    }

    /// Acknowledges everything until nothing comes for a while.
    async fn follow(&mut self) {
        while let Some(payload) = self.next(SOON).await {
            self.acknowledge(&payload).await;
        }
    }

    /// Returns whether the broker closed the connection after the fault.
    async fn apply(&mut self, fault: Fault) -> bool {
        if matches!(fault, Fault::AcksBeforeItIsTold) {
            // Sent while no message is in flight, to which the response would be credited.
            self.follow().await;
            self.ztunnel.ack().await;
            return self.ztunnel.hung_up(SOON).await;
        }
        let payload = self.next(SOON).await.expect("a message was due");
        match fault {
            Fault::AcksBeforeItIsTold | Fault::NeverAcks => {}
            Fault::AcksAfterTheTimeout => {
                assert!(self.ztunnel.hung_up(ACK_TIMEOUT + SOON).await);
                return true;
            }
            Fault::AcksTwice => {
                self.acknowledge(&payload).await;
                self.ztunnel.ack().await;
            }
            Fault::AnswersGarbage => self.ztunnel.send(b"\xff\xff\xff").await,
            Fault::AnswersHello => self.ztunnel.send(b"\x08\x01").await,
            Fault::AnswersTooLong => self.ztunnel.send(&vec![0x0a; 70_000]).await,
            Fault::SendsAnEmptyPacket => self.ztunnel.send(b"").await,
            Fault::HangsUp => return true,
            Fault::CannotReadIt => self.ztunnel.nack("failure to read message : eh").await,
            Fault::ForbidsIt => self.ztunnel.nack("failure to process message : no").await,
        }
        self.ztunnel.hung_up(ACK_TIMEOUT + SOON).await
    }
}

/// Three pods of the set and one added by a caller; the fault hits message `n` of the five.
async fn check(fault: Fault, n: usize) {
    let bench = Bench::start();
    let pods = (1..=3).map(|n| workload(&format!("c{n}"), &format!("p{n}"), 0, n));
    bench.set(3, pods.collect());
    let began = Instant::now();
    let add = bench.add(workload("c9", "p9", 1, 9), CALLER);
    let mut first = Session::begin(&bench).await;
    for _ in 0..n {
        let payload = first.next(SOON).await.expect("a message was due");
        first.acknowledge(&payload).await;
    }
    let acknowledged = first.acknowledged.clone();
    assert!(
        first.apply(fault).await,
        "{fault:?} at {n}: the session goes on"
    );
    let acknowledged = acknowledged.union(&first.acknowledged).cloned().collect();
    check_credit(&bench, &acknowledged, fault, n);
    drop(first);

    let mut second = Session::begin(&bench).await;
    second.follow().await;
    let served = timeout(CALLER, add).await.expect("answered in its time");
    let served = served.unwrap();
    assert!(began.elapsed() <= CALLER + SOON, "{fault:?} at {n}");
    assert!(served.is_ok(), "{fault:?} at {n}: {served:?}");
    let all: BTreeSet<_> = ["p1", "p2", "p3", "p9"].map(str::to_owned).into();
    assert_eq!(second.acknowledged, all, "{fault:?} at {n}");
    assert_eq!(bench.hub.descriptors(), 4, "{fault:?} at {n}");
}

/// No pod may count as served that the ztunnel did not acknowledge.
fn check_credit(bench: &Bench, acknowledged: &BTreeSet<String>, fault: Fault, n: usize) {
    let listed = bench.hub.list().workloads;
    for state in listed.iter().flat_map(|it| &it.states) {
        let (uid, added) = (&state.uid, state.phase() == WorkloadPhase::Added);
        assert!(
            !added || acknowledged.contains(uid),
            "{fault:?} at {n}: {uid}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn every_fault_at_every_message_ends_the_session_and_the_next_one_puts_it_right() {
    for fault in FAULTS {
        for n in 0..5 {
            check(fault, n).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_acknowledgements_at_once_the_second_is_credited_to_no_pod() {
    let bench = Bench::start();
    let pods = (1..=2).map(|n| workload(&format!("c{n}"), &format!("p{n}"), 0, n));
    bench.set(2, pods.collect());
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    ztunnel.ack_twice_at_once();
    assert!(ztunnel.hung_up(SOON).await, "p2 was sent");
}

#[tokio::test(start_paused = true)]
async fn the_caller_of_a_pod_in_quarantine_receives_the_cause_and_the_wait() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let add = bench.add(workload("c1", "p1", 0, 1), CALLER);
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    drop(ztunnel);
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "keep p1");
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    drop(ztunnel);
    let ztunnel = bench.ztunnel().await;
    let failure = add.await.unwrap().unwrap_err();
    assert_eq!(failure.reason, Reason::ZtunnelQuarantined);
    let expected =
        "ztunnel's connection ended 2 times in a row while a message about the pod was unanswered";
    assert!(failure.message.contains(expected), "{}", failure.message);
    let wait = failure.retry_after.unwrap();
    assert!(wait > Duration::from_secs(58) && wait <= Duration::from_secs(60));

    // Other pods are served, and so is this one after its quarantine.
    loop {
        let message = describe(&ztunnel.ack_next().await);
        assert_ne!(message, "add p1");
        if message == "snapshot sent" {
            break;
        }
    }
    let other = bench.add(workload("c2", "p2", 1, 2), CALLER);
    assert_eq!(describe(&ztunnel.ack_next().await), "add p2");
    other.await.unwrap().unwrap();
    let again = bench.add(workload("c1b", "p1", 2, 3), CALLER);
    let failure = again.await.unwrap().unwrap_err();
    assert_eq!(
        failure.reason,
        Reason::ZtunnelQuarantined,
        "another sandbox"
    );
    tokio::time::sleep(wait).await;
    let last = bench.add(workload("c1c", "p1", 2, 4), CALLER);
    assert_eq!(describe(&ztunnel.ack_next().await), "add p1");
    last.await.unwrap().unwrap();
}
