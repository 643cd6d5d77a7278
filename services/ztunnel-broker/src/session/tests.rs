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
        script.inputs.desired.set(Revision(1), all, now);
        script.fetch();
        script.session.on_hello();
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

    fn fetch(&mut self) {
        let missing: Vec<_> = self
            .inputs
            .desired
            .missing()
            .map(|(it, id)| (it.clone(), id))
            .collect();
        for (sandbox, id) in missing {
            self.inputs.desired.store(&sandbox, descriptor(id.inode));
        }
    }

    fn put(&mut self, it: Workload) {
        let inode = it.netns.unwrap().inode;
        self.callers.push(self.inputs.waits.subscribe(&it.uid));
        self.inputs
            .desired
            .add(it, descriptor(inode), self.now)
            .unwrap();
    }

    fn remove(&mut self, container: &str, revision: u64) {
        let removed = self
            .inputs
            .desired
            .remove(&sandbox(container), Revision(revision));
        removed.unwrap();
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
        self.session.on_ack(Ok(()), self.now).unwrap();
    }

    fn nack(&mut self, error: &str) {
        self.session.on_ack(Nack::parse(error), self.now).unwrap();
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
    script.inputs.desired.set(
        Revision(2),
        vec![workload("c2", "p2", 2, 1), workload("c3", "p3", 3, 2)],
        script.now,
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
    script
        .inputs
        .desired
        .set(Revision(2), vec![workload("c", "p", 1, 2)], script.now);
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
    let mut script = Script::greeted(vec![workload("c", "p", 1, 1)]);
    assert_eq!(script.next(), "add p as p in 1");
    let info = info("renamed");
    script.put(Workload {
        info,
        ..workload("c", "p", 1, 2)
    });
    script.ack();
    script.expect(&["del p", "snapshot sent", "add p as renamed in 1"]);
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
    script.session.retry_now(&uid("p"), script.now);
    script.expect(&["add p as p in 1"]);
}

#[test]
fn a_refusal_of_anything_but_an_add_ends_the_session() {
    let mut script = Script::live(vec![workload("c", "p", 1, 1)]);
    script.remove("c", 2);
    assert_eq!(script.next(), "del p");
    let end = script
        .session
        .on_ack(Nack::parse("failure to read message"), script.now);
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
    script.expect(&["del p2", "snapshot sent"]);
    assert_eq!(count(&script), (0, 0));
}
