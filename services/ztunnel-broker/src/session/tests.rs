//! Scripts of a session: its messages and the responses.

mod blame;

use super::*;
use crate::{
    fixture::{descriptor, info, sandbox, uid, workload},
    peer::Ztunnel,
    quarantine::LostDuring,
};
use inpod_proto::zds::{WorkloadRequest, workload_request::Payload};
use inpod_types::{Revision, Workload};
use prost::Message as _;
use tokio::sync::watch;

const TIMEOUT: Duration = Duration::from_secs(10);
const WHO: Ztunnel = Ztunnel::Process(1);

fn session(now: Instant) -> Session {
    Session::new(Peer::from_pid(1), TIMEOUT, now)
}

struct Script {
    session: Session,
    inputs: Inputs,
    /// Callers that wait for the pods of [`Script::put`].
    callers: Vec<watch::Receiver<()>>,
    now: Instant,
}

impl Script {
    /// Starts after the hello, with the given desired set and all descriptors.
    fn greeted(all: Vec<Workload>) -> Self {
        let now = Instant::now();
        let mut script = Self {
            session: session(now),
            inputs: Inputs::default(),
            callers: Vec::new(),
            now,
        };
        script.set(1, all);
        script.fetch();
        script.session.on_hello(&script.inputs, now);
        script
    }

    fn live(all: Vec<Workload>) -> Self {
        let mut script = Self::greeted(all);
        while script.next() != "snapshot sent" {
            script.ack();
        }
        script.ack();
        script
    }

    fn set(&mut self, revision: u64, all: Vec<Workload>) {
        let changed = self.inputs.desired.set(Revision(revision), all, self.now);
        self.session.on_set(&changed, &self.inputs, self.now);
    }

    fn fetch(&mut self) {
        let missing: Vec<_> = self
            .inputs
            .desired
            .missing()
            .map(|(it, id)| (it.clone(), id))
            .collect();
        for (sandbox, id) in missing {
            let stored = self.inputs.desired.store(&sandbox, descriptor(id.inode));
            let uid = stored.unwrap();
            self.session.on_change(&uid, &self.inputs, self.now);
        }
    }

    fn put(&mut self, it: Workload) {
        let (uid, inode) = (it.uid.clone(), it.netns.unwrap().inode);
        self.callers.push(self.inputs.waits.subscribe(&it.uid));
        self.inputs
            .desired
            .add(it, descriptor(inode), self.now)
            .unwrap();
        self.session.on_add(&uid, &self.inputs, self.now);
    }

    fn remove(&mut self, container: &str, revision: u64) {
        let (desired, sandbox) = (&mut self.inputs.desired, sandbox(container));
        let uid = desired.get(&sandbox).unwrap().workload.uid.clone();
        desired.remove(&sandbox, Revision(revision)).unwrap();
        self.session.on_change(&uid, &self.inputs, self.now);
    }

    /// Returns the next message as text; without a message, the text is empty.
    fn next(&mut self) -> String {
        let message = self.session.next(&self.inputs, self.now);
        message.map_or_else(String::new, |message| {
            let request = WorkloadRequest::decode(&*message.encode()).unwrap();
            match request.payload.unwrap() {
                Payload::Add(add) => {
                    let netns = message.descriptor().unwrap().netns().inode;
                    format!(
                        "add {} as {} in {netns}",
                        add.uid,
                        add.workload_info.unwrap().name
                    )
                }
                Payload::Keep(keep) => format!("keep {}", keep.uid),
                Payload::Del(del) => format!("del {}", del.uid),
                Payload::SnapshotSent(_) => "snapshot sent".to_owned(),
            }
        })
    }

    fn wake_at(&self) -> Option<Instant> {
        self.session.wake_at(&self.inputs, self.now)
    }

    fn ack(&mut self) {
        self.session.on_ack(Ok(()), &self.inputs, self.now).unwrap();
    }

    fn nack(&mut self, error: &str) {
        let nack = Nack::parse(error);
        self.session.on_ack(nack, &self.inputs, self.now).unwrap();
    }

    /// Expects and acknowledges the given messages, and no further message.
    fn expect(&mut self, messages: &[&str]) {
        for expected in messages {
            assert_eq!(self.next(), *expected);
            self.ack();
        }
        assert_eq!(self.next(), "");
    }
}

#[test]
fn adds_come_before_keeps_and_keeps_only_when_the_fetching_had_its_chance() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 0, 1), workload("c2", "p2", 2, 1)]);
    script.set(
        2,
        vec![workload("c2", "p2", 2, 1), workload("c3", "p3", 3, 2)],
    );
    assert_eq!(script.next(), "add p2 as p2 in 2");
    script.ack();
    assert_eq!(script.next(), "");
    assert_eq!(script.wake_at(), script.inputs.desired.fetch_deadline());
    script.now += Duration::from_secs(2);
    script.expect(&["keep p3", "snapshot sent"]);
    script.fetch();
    script.expect(&["add p3 as p3 in 3"]);
}

#[test]
fn a_descriptor_that_comes_during_the_snapshot_makes_an_add_of_a_keep() {
    let mut script = Script::greeted(vec![]);
    script.set(2, vec![workload("c", "p", 1, 2)]);
    assert_eq!(script.next(), "");
    script.fetch();
    script.expect(&["add p as p in 1", "snapshot sent"]);
}

#[test]
fn a_change_that_was_taken_back_in_time_costs_nothing() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    script.remove("c", 3);
    script.expect(&[]);
}

/// Before the end of the snapshot, ztunnel neither stops a deleted pod nor accepts changed info.
#[test]
fn other_info_during_the_snapshot_waits_for_its_end() {
    let mut script = Script::greeted(vec![workload("c", "p", 1, 1), workload("c2", "q", 2, 1)]);
    assert_eq!(script.next(), "add p as p in 1");
    let info = info("renamed");
    script.put(Workload {
        info,
        ..workload("c", "p", 1, 2)
    });
    script.ack();
    script.expect(&[
        "del p",
        "add q as q in 2",
        "snapshot sent",
        "add p as renamed in 1",
    ]);
}

/// ztunnel stops a pod before it answers the Del, so the acknowledgement of the Add is void.
#[test]
fn a_pod_whose_del_is_in_flight_is_queued() {
    let mut script = Script::live(vec![workload("c", "p", 1, 1)]);
    script.remove("c", 2);
    assert_eq!(script.next(), "del p");
    script.put(workload("c", "p", 1, 3));
    let phase = |script: &Script| {
        let wanted = script.inputs.desired.current(&uid("p")).unwrap();
        let quarantine = &script.inputs.quarantine;
        script
            .session
            .workload_phase(wanted, quarantine, script.now)
    };
    assert_eq!(phase(&script), WorkloadPhase::Queued);
    script.ack();
    script.expect(&["add p as p in 1"]);
    assert_eq!(phase(&script), WorkloadPhase::Added);
}

#[test]
fn a_snapshot_ends_while_callers_add_without_a_pause() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 1, 1), workload("c2", "p2", 2, 1)]);
    let mut order = Vec::new();
    for n in 3..7 {
        script.put(workload(&format!("c{n}"), &format!("p{n}"), n, n));
        order.push(script.next());
        script.ack();
    }
    let expected = [
        "add p3 as p3 in 3",
        "add p1 as p1 in 1",
        "add p4 as p4 in 4",
        "add p2 as p2 in 2",
    ];
    assert_eq!(order, expected);
    assert_eq!(script.next(), "snapshot sent");
}

#[test]
fn a_refusal_in_another_netns_starts_the_wait_anew() {
    let mut script = Script::live(vec![]);
    script.put(workload("c1", "p", 1, 2));
    for _ in 0..2 {
        assert_eq!(script.next(), "add p as p in 1");
        script.nack("failure to start proxy : in use");
        script.expect(&["del p"]);
        script.now = script.wake_at().unwrap();
    }
    script.put(workload("c2", "p", 2, 3));
    assert_eq!(script.next(), "add p as p in 2");
    script.nack("failure to start proxy : in use");
    script.expect(&["del p"]);
    let retry_at = script.now + Duration::from_secs(5);
    assert_eq!(script.wake_at(), Some(retry_at));
}

#[test]
fn who_is_asked_for_anew_is_tried_at_once() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    script.next();
    script.nack("failure to start proxy : in use");
    script.expect(&["del p"]);
    script.put(workload("c", "p", 1, 3));
    script.expect(&["add p as p in 1"]);
}

#[test]
fn a_refusal_of_anything_but_an_add_ends_the_session() {
    let mut script = Script::live(vec![workload("c", "p", 1, 1)]);
    script.remove("c", 2);
    assert_eq!(script.next(), "del p");
    let nack = Nack::parse("failure to read message");
    let end = script.session.on_ack(nack, &script.inputs, script.now);
    assert!(
        matches!(
            end,
            Err(SessionEnd::Refused {
                verb: "delete a pod",
                ..
            })
        ),
        "{end:?}"
    );
}

#[test]
fn a_session_without_work_needs_no_clock() {
    let script = Script::live(vec![workload("c", "p", 1, 1)]);
    assert_eq!(script.wake_at(), None);
}

#[test]
fn a_session_counts_what_it_was_answered_and_what_it_is_still_owed() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 1, 1), workload("c2", "p2", 2, 1)]);
    let count = |script: &Script| {
        let queued = script.session.queued(&script.inputs, script.now);
        (queued, script.session.serves())
    };
    assert_eq!(count(&script), (2, 0));
    script.next();
    script.nack("failure to start proxy : in use");
    script.next();
    script.ack();
    script.next();
    script.ack();
    let counts = Counts {
        acknowledged: 2,
        refused: 1,
    };
    assert_eq!(script.session.counts, counts);
    assert_eq!(count(&script), (0, 1));
    script.remove("c2", 2);
    script.expect(&["snapshot sent", "del p2"]);
    assert_eq!(count(&script), (0, 0));
}
