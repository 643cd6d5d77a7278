//! The pods that a session has to examine.

use std::collections::{BTreeSet, VecDeque};

use inpod_types::PodUid;

/// A queue with two priorities: callers wait for the urgent pods.
#[derive(Debug, Default)]
pub struct Queue {
    urgent: UniqueFifo,
    normal: UniqueFifo,
}

impl Queue {
    pub fn push_urgent(&mut self, uid: &PodUid) {
        self.urgent.push(uid);
    }

    pub fn push(&mut self, uid: &PodUid) {
        self.normal.push(uid);
    }

    /// Returns the number of queued pods. A pod in both parts counts twice.
    pub fn count(&self) -> usize {
        self.urgent.order.len() + self.normal.order.len()
    }

    pub fn pop(&mut self) -> Option<PodUid> {
        self.urgent.pop().or_else(|| self.normal.pop())
    }
}

#[derive(Debug, Default)]
struct UniqueFifo {
    order: VecDeque<PodUid>,
    queued: BTreeSet<PodUid>,
}

impl UniqueFifo {
    fn push(&mut self, uid: &PodUid) {
        if self.queued.insert(uid.clone()) {
            self.order.push_back(uid.clone());
        }
    }

    fn pop(&mut self) -> Option<PodUid> {
        let uid = self.order.pop_front()?;
        self.queued.remove(&uid);
        Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::uid;

    #[test]
    fn the_first_lane_goes_first_and_each_pod_stands_once_in_a_lane() {
        let mut queue = Queue::default();
        for name in ["a", "b", "a"] {
            queue.push(&uid(name));
        }
        queue.push_urgent(&uid("b"));
        queue.push_urgent(&uid("b"));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [uid("b"), uid("a"), uid("b")]);
    }
}
