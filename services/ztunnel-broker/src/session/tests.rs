//! Scripts of a session: its messages and the responses.

mod blame;

use super::*;
use crate::{
    fixture::{descriptor, info, sandbox, uid, workload},
    quarantine::LostDuring,
};
use inpod_proto::zds::{WorkloadRequest, workload_request::Payload};
use inpod_types::{Revision, Workload};
use prost::Message as _;

const TIMEOUT: Duration = Duration::from_secs(10);
const WHO: Ztunnel = Ztunnel::Process(1);

struct Script {
    session: Session,
    desired: Desired,
    quarantine: Quarantine,
    now: Instant,
}

impl Script {
    /// Starts after the hello, with the given desired set and all descriptors.
    fn greeted(all: Vec<Workload>) -> Self {
        let now = Instant::now();
        let mut script = Self {
            session: Session::new(WHO, TIMEOUT, now),
            desired: Desired::default(),
            quarantine: Quarantine::default(),
            now,
        };
        script.desired.set(Revision(1), all, now);
        script.fetch();
        script.session.on_hello(&script.desired);
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
            .desired
            .missing()
            .map(|(it, id)| (it.clone(), id))
            .collect();
        for (sandbox, id) in missing {
            let changes = self.desired.store(&sandbox, descriptor(id.inode));
            changes.keys().for_each(|uid| self.session.queue(uid));
        }
    }

    fn put(&mut self, it: Workload) {
        let inode = it.netns.unwrap().inode;
        let changes = self.desired.add(it, descriptor(inode), self.now).unwrap();
        changes
            .keys()
            .for_each(|uid| self.session.queue_urgent(uid));
    }

    fn remove(&mut self, container: &str, revision: u64) {
        let changes = self
            .desired
            .remove(&sandbox(container), Revision(revision))
            .unwrap();
        changes
            .keys()
            .for_each(|uid| self.session.queue_urgent(uid));
    }

    /// Returns the next message as text; without a message, the text is empty.
    fn next(&mut self) -> String {
        let inputs = SessionInputs {
            desired: &self.desired,
            quarantine: &self.quarantine,
        };
        let message = self.session.next(inputs, self.now);
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
        self.session.wake_at(SessionInputs {
            desired: &self.desired,
            quarantine: &self.quarantine,
        })
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
fn nothing_is_sent_before_the_hello() {
    let mut script = Script::greeted(vec![workload("c", "p", 1, 1)]);
    script.session = Session::new(WHO, TIMEOUT, script.now);
    assert_eq!(script.next(), "");
    assert_eq!(script.session.stage(), Stage::Connected);
}

#[test]
fn nothing_is_sent_before_the_set_is_known() {
    let mut session = Session::new(WHO, TIMEOUT, Instant::now());
    let desired = Desired::default();
    session.on_hello(&desired);
    let inputs = SessionInputs {
        desired: &desired,
        quarantine: &Quarantine::default(),
    };
    let late = Instant::now() + TIMEOUT * 100;
    assert!(session.next(inputs, late).is_none());
}

#[test]
fn a_second_hello_does_not_open_a_second_snapshot() {
    let mut script = Script::live(vec![]);
    script.session.on_hello(&script.desired);
    script.expect(&[]);
    assert_eq!(script.session.stage(), Stage::Live);
}

#[test]
fn the_session_is_live_when_the_end_of_its_snapshot_is_acknowledged() {
    let mut script = Script::greeted(vec![]);
    assert_eq!(script.next(), "snapshot sent");
    assert_eq!(script.session.stage(), Stage::Snapshot);
    script.ack();
    assert_eq!(script.session.stage(), Stage::Live);
}

#[test]
fn adds_come_before_keeps_and_keeps_only_when_the_fetching_had_its_chance() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 0, 1), workload("c2", "p2", 2, 1)]);
    script.desired.set(
        Revision(2),
        vec![workload("c2", "p2", 2, 1), workload("c3", "p3", 3, 2)],
        script.now,
    );
    script.session.queue(&uid("p3"));
    script.session.queue(&uid("p1"));
    assert_eq!(script.next(), "add p2 as p2 in 2");
    script.ack();
    assert_eq!(script.next(), "");
    assert_eq!(script.wake_at(), script.desired.fetch_deadline());
    script.now += Duration::from_secs(2);
    script.expect(&["keep p3", "snapshot sent"]);
    script.fetch();
    script.expect(&["add p3 as p3 in 3"]);
}

#[test]
fn a_descriptor_that_comes_during_the_snapshot_makes_an_add_of_a_keep() {
    let mut script = Script::greeted(vec![]);
    script
        .desired
        .set(Revision(2), vec![workload("c", "p", 1, 2)], script.now);
    script.session.queue(&uid("p"));
    assert_eq!(script.next(), "");
    script.fetch();
    script.expect(&["add p as p in 1", "snapshot sent"]);
}

#[test]
fn what_is_removed_during_the_snapshot_is_deleted_at_once() {
    let mut script = Script::greeted(vec![workload("c", "p", 1, 1)]);
    assert_eq!(script.next(), "add p as p in 1");
    script.remove("c", 2);
    script.ack();
    script.expect(&["del p", "snapshot sent"]);
}

#[test]
fn a_change_that_was_taken_back_in_time_costs_nothing() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    script.remove("c", 3);
    script.expect(&[]);
}

#[test]
fn another_netns_is_added_over_the_old_one() {
    let mut script = Script::live(vec![workload("old", "p", 1, 1)]);
    script.put(workload("new", "p", 2, 2));
    script.expect(&["add p as p in 2"]);
}

#[test]
fn other_info_of_the_same_netns_is_deleted_first() {
    let mut script = Script::live(vec![workload("c", "p", 1, 1)]);
    let info = info("renamed");
    script.put(Workload {
        info,
        ..workload("c", "p", 1, 2)
    });
    script.expect(&["del p", "add p as renamed in 1"]);
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
fn a_refused_workload_is_taken_back_and_tried_again_with_growing_waits() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    for seconds in [5, 10, 20, 40, 60, 60] {
        assert_eq!(script.next(), "add p as p in 1");
        script.nack("failure to start proxy : in use");
        script.expect(&["del p"]);
        let retry_at = script.now + Duration::from_secs(seconds);
        assert_eq!(script.wake_at(), Some(retry_at));
        script.now = retry_at;
    }
    script.expect(&["add p as p in 1"]);
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
fn a_refused_workload_that_is_removed_is_not_tried_again() {
    let mut script = Script::live(vec![]);
    script.put(workload("c", "p", 1, 2));
    script.next();
    script.nack("failure to start proxy : in use");
    script.remove("c", 3);
    script.expect(&["del p"]);
    script.now += Duration::from_secs(600);
    script.expect(&[]);
    assert!(script.session.record_of(&uid("p")).is_none());
}

#[test]
fn a_refused_workload_does_not_hold_up_the_snapshot() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 1, 1), workload("c2", "p2", 2, 1)]);
    script.next();
    script.nack("failure to start proxy : in use");
    script.expect(&["del p1", "add p2 as p2 in 2", "snapshot sent"]);
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
fn an_unsolicited_answer_ends_the_session() {
    let mut script = Script::live(vec![]);
    assert_eq!(
        script.session.on_ack(Ok(()), script.now),
        Err(SessionEnd::Unsolicited)
    );
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
fn silence_ends_the_session_at_its_own_time() {
    let mut script = Script::greeted(vec![]);
    script.next();
    let deadline = script.now + TIMEOUT;
    assert_eq!(script.wake_at(), Some(deadline));
    assert_eq!(
        script
            .session
            .check_deadline(deadline - Duration::from_millis(1)),
        Ok(())
    );
    assert_eq!(
        script.session.check_deadline(deadline),
        Err(SessionEnd::Silent(TIMEOUT))
    );
    script.ack();
    assert_eq!(script.session.check_deadline(deadline), Ok(()));
}

#[test]
fn a_session_without_work_needs_no_clock() {
    let script = Script::live(vec![workload("c", "p", 1, 1)]);
    assert_eq!(script.wake_at(), None);
}

#[test]
fn a_session_counts_what_it_was_answered_and_what_it_is_still_owed() {
    let mut script = Script::greeted(vec![workload("c1", "p1", 1, 1), workload("c2", "p2", 2, 1)]);
    assert_eq!((script.session.queued(), script.session.serves()), (2, 0));
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
    assert_eq!(script.session.counts(), counts);
    assert_eq!((script.session.queued(), script.session.serves()), (1, 1));
    script.remove("c2", 2);
    script.expect(&["del p2", "snapshot sent"]);
    assert_eq!(script.session.serves(), 0);
}
