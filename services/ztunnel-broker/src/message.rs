//! Requests to ztunnel. Requests on which stock ztunnel exits or disconnects cannot be constructed: an Add without
//! workload info, a number of descriptors other than one on an Add and zero elsewhere, and a Keep or SnapshotSent
//! without an open [`Snapshot`].

use inpod_proto::zds::{self, workload_request::Payload};
use inpod_types::{PodUid, WorkloadInfo};
use prost::Message as _;

use crate::descriptors::Descriptor;

/// The largest packet that stock ztunnel reads completely.
pub const MAX_PACKET_BYTES: usize = 1024;

#[derive(Clone, Debug)]
pub struct Message {
    payload: Payload,
    /// `None` for everything but an Add.
    descriptor: Option<Descriptor>,
}

impl Message {
    /// Requests to serve a pod in the netns of `descriptor`.
    pub fn add(uid: &PodUid, info: &WorkloadInfo, descriptor: Descriptor) -> Self {
        let info = zds::WorkloadInfo {
            name: info.name.to_string(),
            namespace: info.namespace.to_string(),
            service_account: info.service_account.to_string(),
        };
        let add = zds::AddWorkload {
            uid: uid.to_string(),
            workload_info: Some(info),
        };
        Self {
            payload: Payload::Add(add),
            descriptor: Some(descriptor),
        }
    }

    pub fn del(uid: &PodUid) -> Self {
        let uid = uid.to_string();
        Self::without_descriptor(Payload::Del(zds::DelWorkload { uid }))
    }

    fn without_descriptor(payload: Payload) -> Self {
        Self {
            payload,
            descriptor: None,
        }
    }

    /// Returns the descriptor sent along with an Add.
    pub fn descriptor(&self) -> Option<&Descriptor> {
        self.descriptor.as_ref()
    }

    /// Returns the UID of the pod; `None` for SnapshotSent.
    pub fn uid(&self) -> Option<&str> {
        match &self.payload {
            Payload::Add(zds::AddWorkload { uid, .. })
            | Payload::Keep(zds::KeepWorkload { uid })
            | Payload::Del(zds::DelWorkload { uid }) => Some(uid),
            Payload::SnapshotSent(_) => None,
        }
    }

    pub fn info(&self) -> Option<&zds::WorkloadInfo> {
        match &self.payload {
            Payload::Add(add) => add.workload_info.as_ref(),
            Payload::Keep(_) | Payload::Del(_) | Payload::SnapshotSent(_) => None,
        }
    }

    /// Returns the name of the message for logs and metrics.
    pub fn verb(&self) -> &'static str {
        match &self.payload {
            Payload::Add(_) => "add",
            Payload::Keep(_) => "keep",
            Payload::Del(_) => "delete",
            Payload::SnapshotSent(_) => "snapshot sent",
        }
    }

    /// Encodes the message into 1 to [`MAX_PACKET_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let payload = Some(self.payload.clone());
        zds::WorkloadRequest { payload }.encode_to_vec()
    }
}

/// An open snapshot, the condition for sending a Keep. [`Self::end`] consumes the snapshot, so that it ends once.
#[derive(Debug)]
pub struct Snapshot(());

impl Snapshot {
    pub(crate) fn open() -> Self {
        Self(())
    }

    /// Requests to keep serving a pod that ztunnel already serves.
    pub fn keep(&self, uid: &PodUid) -> Message {
        let uid = uid.to_string();
        Message::without_descriptor(Payload::Keep(zds::KeepWorkload { uid }))
    }

    /// Ends the snapshot: ztunnel stops every pod not named in the snapshot.
    pub fn end(self) -> Message {
        Message::without_descriptor(Payload::SnapshotSent(zds::SnapshotSent {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// The expected bytes are accepted by stock ztunnel (services/docs/facts/ztunnel.md, 3.1).
    #[test]
    fn messages_have_the_bytes_that_stock_ztunnel_accepts() {
        let info = fixture::info("client");
        let info = WorkloadInfo {
            service_account: "sa-client".parse().unwrap(),
            ..info
        };
        let add = Message::add(&fixture::uid("uid-1"), &info, fixture::descriptor(1));
        let expected =
            b"\x0a\x25\x0a\x05uid-1\x12\x1c\x0a\x06client\x12\x07default\x1a\x09sa-client";
        assert_eq!(add.encode(), expected);
        assert_eq!(Snapshot::open().end().encode(), b"\x1a\x00");
        let keep = Snapshot::open().keep(&fixture::uid("u"));
        assert_eq!(keep.encode(), b"\x2a\x03\x0a\x01u");
        assert_eq!(
            Message::del(&fixture::uid("u")).encode(),
            b"\x12\x03\x12\x01u"
        );
    }

    #[test]
    fn only_an_add_carries_a_descriptor() {
        let uid = || fixture::uid("u");
        assert!(Message::del(&uid()).descriptor().is_none());
        assert!(Snapshot::open().keep(&uid()).descriptor().is_none());
        assert!(Snapshot::open().end().descriptor().is_none());
    }
}
