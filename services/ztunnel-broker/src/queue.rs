//! The pods that a session has to look at, each once, in two lanes.

use std::collections::{BTreeSet, VecDeque};

use inpod_types::PodUid;

/// A queue whose first lane goes first: somebody waits for those.
#[derive(Debug, Default)]
pub struct Queue {
    now: Lane,
    later: Lane,
}

impl Queue {
    /// Before everything that waits in the second lane.
    pub fn push(&mut self, uid: &PodUid) {
        self.now.push(uid);
    }

    /// After everything else.
    pub fn push_later(&mut self, uid: &PodUid) {
        self.later.push(uid);
    }

    /// How many places are taken.
    pub fn len(&self) -> usize {
        self.now.order.len() + self.later.order.len()
    }

    /// Whether there is nothing to look at.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next pod to look at.
    pub fn pop(&mut self) -> Option<PodUid> {
        self.now.pop().or_else(|| self.later.pop())
    }
}

#[derive(Debug, Default)]
struct Lane {
    order: VecDeque<PodUid>,
    queued: BTreeSet<PodUid>,
}

impl Lane {
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
            queue.push_later(&uid(name));
        }
        queue.push(&uid("b"));
        queue.push(&uid("b"));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [uid("b"), uid("a"), uid("b")]);
    }
}
