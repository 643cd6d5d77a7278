//! The pods with a message to send, in lanes by kind of message.
//!
//! No lane can starve another: each lane with a pod to send is served once in a round, and within a lane the oldest
//! entry goes first.

use std::collections::BTreeMap;

use inpod_types::PodUid;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// An Add for which a caller waits.
    Awaited,
    Del,
    /// An Add of a pod in the snapshot.
    Name,
    /// A Keep of a pod in the snapshot. A descriptor in time still allows an Add.
    Keep,
    /// Any other Add.
    Add,
    /// An Add of a suspected pod, sent when nothing else is left.
    Suspected,
}

impl Lane {
    /// The lanes in the order of their turns.
    const ROUND: [Self; 5] = [Self::Awaited, Self::Del, Self::Name, Self::Keep, Self::Add];
}

#[derive(Debug, Default)]
pub struct Queue {
    lanes: BTreeMap<(Lane, u64), PodUid>,
    places: BTreeMap<PodUid, (Lane, u64)>,
    /// The number of entries so far.
    entered: u64,
    last: Option<Lane>,
}

impl Queue {
    /// Moves a pod to the end of a lane, or out of the queue. Within its lane, a pod keeps its place.
    pub fn place(&mut self, uid: &PodUid, lane: Option<Lane>) {
        if self.lane_of(uid) == lane {
            return;
        }
        if let Some(place) = self.places.remove(uid) {
            self.lanes.remove(&place);
        }
        if let Some(lane) = lane {
            let place = (lane, self.entered);
            self.entered += 1;
            self.lanes.insert(place, uid.clone());
            self.places.insert(uid.clone(), place);
        }
    }

    pub fn lane_of(&self, uid: &PodUid) -> Option<Lane> {
        self.places.get(uid).map(|(lane, _)| *lane)
    }

    /// Returns the next pod by turns; `may_keep` opens the lane of Keeps. Suspected pods take no turns.
    pub fn next(&self, may_keep: bool) -> Option<(Lane, &PodUid)> {
        let mut lanes = Lane::ROUND.into_iter();
        let last = lanes.position(|lane| Some(lane) == self.last);
        let first = last.map_or(0, |last| last + 1);
        let round = Lane::ROUND.into_iter().cycle().skip(first);
        let is_open = |lane: &Lane| *lane != Lane::Keep || may_keep;
        round
            .take(Lane::ROUND.len())
            .filter(is_open)
            .find_map(|lane| Some((lane, self.of(lane).next()?)))
    }

    /// Records the lane of the last message.
    pub fn served(&mut self, lane: Lane) {
        self.last = Some(lane);
    }

    pub fn is_lane_empty(&self, lane: Lane) -> bool {
        self.of(lane).next().is_none()
    }

    /// Returns the pods of a lane, in their order.
    pub fn of(&self, lane: Lane) -> impl Iterator<Item = &PodUid> {
        let lane = self.lanes.range((lane, 0)..=(lane, u64::MAX));
        lane.map(|(_, uid)| uid)
    }

    /// Returns the number of pods in all lanes.
    pub fn pods(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::uid;

    fn take(queue: &mut Queue) -> String {
        let (lane, pod) = queue.next(true).unwrap();
        let pod = pod.clone();
        queue.place(&pod, None);
        queue.served(lane);
        pod.to_string()
    }

    #[test]
    fn lanes_take_turns_and_send_the_oldest_entry_first() {
        let mut queue = Queue::default();
        for (pod, lane) in [
            ("z-del", Lane::Del),
            ("a-del", Lane::Del),
            ("add", Lane::Add),
            ("awaited-1", Lane::Awaited),
            ("awaited-2", Lane::Awaited),
            ("awaited-3", Lane::Awaited),
        ] {
            queue.place(&uid(pod), Some(lane));
        }
        let order: Vec<_> = (0..6).map(|_| take(&mut queue)).collect();
        let expected = [
            "awaited-1",
            "z-del",
            "add",
            "awaited-2",
            "a-del",
            "awaited-3",
        ];
        assert_eq!(order, expected);
        assert_eq!(queue.next(true), None);
    }

    #[test]
    fn a_pod_keeps_its_place_unless_its_lane_changes() {
        let mut queue = Queue::default();
        for pod in ["p", "q"] {
            queue.place(&uid(pod), Some(Lane::Del));
        }
        queue.place(&uid("p"), Some(Lane::Del));
        assert_eq!(queue.next(true), Some((Lane::Del, &uid("p"))));
        queue.place(&uid("p"), Some(Lane::Add));
        assert_eq!(queue.next(true), Some((Lane::Del, &uid("q"))));
        assert_eq!(queue.pods(), 2);
    }

    #[test]
    fn keeps_and_suspected_pods_wait() {
        let mut queue = Queue::default();
        queue.place(&uid("keep"), Some(Lane::Keep));
        queue.place(&uid("suspected"), Some(Lane::Suspected));
        assert_eq!(queue.next(false), None);
        assert_eq!(queue.next(true), Some((Lane::Keep, &uid("keep"))));
    }
}
