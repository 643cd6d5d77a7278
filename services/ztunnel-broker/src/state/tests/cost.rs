//! Counts what a message costs beside few and many pods.

use std::time::{Duration, Instant};

use inpod_service::Readiness;
use inpod_types::{Revision, Workload};

use crate::{
    fixture::{self, take_steps},
    peer::Peer,
    session::SessionId,
    state::State,
};

struct Node {
    state: State,
    id: SessionId,
    now: Instant,
}

#[derive(Debug, PartialEq, Eq)]
struct Steps {
    set: u64,
    snapshot: u64,
    set_again: u64,
    add_and_remove: u64,
}

impl Node {
    fn workloads(count: u64) -> Vec<Workload> {
        let pod = |n| fixture::workload(&format!("c{n}"), &format!("p{n}"), n, n);
        (1..=count).map(pod).collect()
    }

    /// Acknowledges messages until no more come; returns their number.
    fn answer_all(&mut self) -> u64 {
        let mut messages = 0;
        while self.state.next(self.id, self.now).0.is_some() {
            self.state.ack(self.id, Ok(()), self.now).unwrap();
            messages += 1;
        }
        messages
    }

    fn measure(count: u64) -> Steps {
        let now = Instant::now();
        let mut state = State::new(Duration::from_secs(10), Readiness::default());
        let id = state.connect(Peer::from_pid(1), now);
        state.hello(id, now);
        let mut node = Self { state, id, now };
        take_steps();
        node.state.set(Revision(count), Self::workloads(count), now);
        for it in Self::workloads(count) {
            let descriptor = fixture::descriptor(it.netns.unwrap().inode);
            node.state.store(&it.sandbox, descriptor, now);
        }
        let set = take_steps();
        assert_eq!(node.answer_all(), count + 1);
        let snapshot = take_steps();
        node.state.set(Revision(count), Self::workloads(count), now);
        let set_again = take_steps();
        let more = fixture::workload("c", "p", count + 1, count + 1);
        let (sandbox, descriptor) = (more.sandbox.clone(), fixture::descriptor(count + 1));
        let waits = node.state.add(more, descriptor, now).unwrap();
        assert_eq!(node.answer_all(), 1);
        node.state
            .remove(&sandbox, Revision(count + 2), now)
            .unwrap();
        assert_eq!(node.answer_all(), 1);
        drop(waits);
        Steps {
            set,
            snapshot,
            set_again,
            add_and_remove: take_steps(),
        }
    }
}

#[test]
fn a_message_costs_the_same_beside_100_and_4000_pods() {
    for count in [100, 4_000] {
        let steps = Node::measure(count);
        let expected = Steps {
            // The pod is placed in the queue by the set, and again by its descriptor.
            set: 2 * count,
            // Each answer decides about its pod.
            snapshot: count,
            // The set is compared with what is known, and each pod is decided about.
            set_again: 2 * count,
            // Two changes and two answers.
            add_and_remove: 4,
        };
        assert_eq!(steps, expected, "{count}");
    }
}
