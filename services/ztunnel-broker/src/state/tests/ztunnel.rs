//! A model of stock ztunnel (services/docs/facts/ztunnel.md, 3.5 to 3.9).

use std::collections::{BTreeMap, BTreeSet};

use inpod_proto::zds::{WorkloadRequest, workload_request::Payload};
use inpod_types::NetnsId;
use prost::Message as _;

use crate::{descriptors::Descriptor, message::Message, session::SessionId};

#[derive(Debug, Default)]
pub(super) struct Ztunnel {
    pub(super) session: Option<SessionId>,
    pub(super) greeted: bool,
    pub(super) in_flight: Option<(Payload, Option<NetnsId>)>,
    pub(super) running: BTreeMap<String, (NetnsId, String)>,
    pub(super) pending: BTreeSet<String>,
    named: BTreeSet<String>,
    /// The pods that were not desired at some time since the hello or the last set: the snapshot need not name them.
    pub(super) released: BTreeSet<String>,
    /// Deleted pods that run until the end of the snapshot.
    deleted: BTreeSet<String>,
    pub(super) complete: bool,
    /// The number of consecutive messages that were no Del although a Del was due.
    pub(super) before_del: usize,
    /// The number of messages since the hello or the last set, until the end of the snapshot.
    pub(super) in_snapshot: usize,
}

impl Ztunnel {
    pub(super) fn reconnect(&mut self, session: SessionId) {
        *self = Self {
            session: Some(session),
            running: std::mem::take(&mut self.running),
            ..Self::default()
        };
    }

    pub(super) fn receive(&mut self, message: &Message) {
        let bytes = message.encode();
        assert!((1..=crate::message::MAX_PACKET_BYTES).contains(&bytes.len()));
        let payload = WorkloadRequest::decode(&*bytes).unwrap().payload.unwrap();
        assert!(self.greeted, "nothing before the hello");
        assert!(self.in_flight.is_none(), "one message in flight");
        let only_before = matches!(payload, Payload::Keep(_) | Payload::SnapshotSent(_));
        assert!(
            !(self.complete && only_before),
            "stock ztunnel exits: {payload:?}"
        );
        if let Payload::Add(add) = &payload {
            assert!(add.workload_info.is_some(), "stock ztunnel exits: {add:?}");
        }
        let netns = message.descriptor().map(Descriptor::netns);
        assert_eq!(netns.is_some(), matches!(payload, Payload::Add(_)));
        // ztunnel stops a pod when the Del arrives, and answers once the pod is stopped.
        if let Payload::Del(del) = &payload
            && self.complete
        {
            self.running.remove(&del.uid);
        }
        self.in_flight = Some((payload, netns));
    }

    pub(super) fn adding(&self) -> Option<&str> {
        match &self.in_flight {
            Some((Payload::Add(add), _)) => Some(&add.uid),
            _ => None,
        }
    }

    /// Returns the pods that the SnapshotSent in flight stops, without deleted pods.
    pub(super) fn stopping(&self) -> Vec<&str> {
        if !matches!(self.in_flight, Some((Payload::SnapshotSent(_), _))) {
            return Vec::new();
        }
        let stops = |uid: &&String| !self.named.contains(*uid) && !self.deleted.contains(*uid);
        let all = self.running.keys().filter(stops);
        all.map(String::as_str).collect()
    }

    pub(super) fn carry_out(&mut self) {
        match self.in_flight.take().unwrap() {
            (Payload::Add(add), Some(netns)) => {
                self.pending.remove(&add.uid);
                self.named.insert(add.uid.clone());
                let running = self.running.get(&add.uid);
                if running.is_none_or(|(had, _)| *had != netns) {
                    let name = add.workload_info.unwrap().name;
                    self.running.insert(add.uid, (netns, name));
                }
            }
            (Payload::Keep(keep), _) => drop(self.named.insert(keep.uid)),
            (Payload::Del(del), _) => {
                self.pending.remove(&del.uid);
                self.named.remove(&del.uid);
                if !self.complete {
                    self.deleted.insert(del.uid);
                }
            }
            (Payload::SnapshotSent(_), _) => {
                self.running.retain(|uid, _| self.named.contains(uid));
                self.complete = true;
            }
            (Payload::Add(_), None) => panic!("an add without a descriptor"),
        }
    }

    /// Refuses the Add in flight because the new proxy cannot start; the old proxy is already stopped. Returns whether
    /// an Add was in flight.
    pub(super) fn refuse(&mut self) -> bool {
        let Some((Payload::Add(add), Some(netns))) = &self.in_flight else {
            return false;
        };
        let running = self.running.get(&add.uid);
        if running.is_some_and(|(had, _)| had == netns) {
            return false;
        }
        self.running.remove(&add.uid);
        self.named.insert(add.uid.clone());
        self.pending.insert(add.uid.clone());
        self.in_flight = None;
        true
    }
}
