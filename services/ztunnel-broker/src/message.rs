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
pub struct Message(Body);

#[derive(Clone, Debug)]
enum Body {
    Add {
        uid: PodUid,
        info: WorkloadInfo,
        descriptor: Descriptor,
    },
    Keep(PodUid),
    Del(PodUid),
    SnapshotSent,
}

impl Message {
    /// Requests to serve a pod in the netns of `descriptor`.
    pub fn add(uid: PodUid, info: WorkloadInfo, descriptor: Descriptor) -> Self {
        Self(Body::Add {
            uid,
            info,
            descriptor,
        })
    }

    pub fn del(uid: PodUid) -> Self {
        Self(Body::Del(uid))
    }

    /// Returns the descriptor sent along with an Add.
    pub fn descriptor(&self) -> Option<&Descriptor> {
        match &self.0 {
            Body::Add { descriptor, .. } => Some(descriptor),
            Body::Keep(_) | Body::Del(_) | Body::SnapshotSent => None,
        }
    }

    /// Returns the UID of the pod; `None` for SnapshotSent.
    pub fn uid(&self) -> Option<&PodUid> {
        match &self.0 {
            Body::Add { uid, .. } | Body::Keep(uid) | Body::Del(uid) => Some(uid),
            Body::SnapshotSent => None,
        }
    }

    pub fn info(&self) -> Option<&WorkloadInfo> {
        match &self.0 {
            Body::Add { info, .. } => Some(info),
            Body::Keep(_) | Body::Del(_) | Body::SnapshotSent => None,
        }
    }

    /// Returns the name of the message for logs and metrics.
    pub fn verb(&self) -> &'static str {
        match &self.0 {
            Body::Add { .. } => "add",
            Body::Keep(_) => "keep",
            Body::Del(_) => "delete",
            Body::SnapshotSent => "snapshot sent",
        }
    }

    /// Encodes the message into 1 to [`MAX_PACKET_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let payload = match &self.0 {
            Body::Add { uid, info, .. } => Payload::Add(zds::AddWorkload {
                uid: uid.to_string(),
                workload_info: Some(wire(info)),
            }),
            Body::Keep(uid) => Payload::Keep(zds::KeepWorkload {
                uid: uid.to_string(),
            }),
            Body::Del(uid) => Payload::Del(zds::DelWorkload {
                uid: uid.to_string(),
            }),
            Body::SnapshotSent => Payload::SnapshotSent(zds::SnapshotSent {}),
        };
        let request = zds::WorkloadRequest {
            payload: Some(payload),
        };
        request.encode_to_vec()
    }
}

fn wire(info: &WorkloadInfo) -> zds::WorkloadInfo {
    zds::WorkloadInfo {
        name: info.name.to_string(),
        namespace: info.namespace.to_string(),
        service_account: info.service_account.to_string(),
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
    pub fn keep(&self, uid: PodUid) -> Message {
        Message(Body::Keep(uid))
    }

    /// Ends the snapshot: ztunnel stops every pod not named in the snapshot.
    pub fn end(self) -> Message {
        Message(Body::SnapshotSent)
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
        let add = Message::add(fixture::uid("uid-1"), info, fixture::descriptor(1));
        let expected =
            b"\x0a\x25\x0a\x05uid-1\x12\x1c\x0a\x06client\x12\x07default\x1a\x09sa-client";
        assert_eq!(add.encode(), expected);
        assert_eq!(Snapshot::open().end().encode(), b"\x1a\x00");
        let keep = Snapshot::open().keep(fixture::uid("u"));
        assert_eq!(keep.encode(), b"\x2a\x03\x0a\x01u");
        assert_eq!(
            Message::del(fixture::uid("u")).encode(),
            b"\x12\x03\x12\x01u"
        );
    }

    #[test]
    fn the_longest_workload_that_parses_fits_into_ztunnels_buffer() {
        let name = [
            &*"a".repeat(63),
            &*"b".repeat(63),
            &*"c".repeat(63),
            &*"d".repeat(61),
        ]
        .join(".");
        let info = WorkloadInfo {
            name: name.parse().unwrap(),
            namespace: "n".repeat(63).parse().unwrap(),
            service_account: name.parse().unwrap(),
        };
        let longer = format!("{name}d");
        assert!(longer.parse::<inpod_types::PodName>().is_err());
        let uid = fixture::uid(&"u".repeat(128));
        assert!("u".repeat(129).parse::<PodUid>().is_err());
        let add = Message::add(uid, info, fixture::descriptor(1));
        assert!(
            add.encode().len() <= MAX_PACKET_BYTES,
            "{}",
            add.encode().len()
        );
    }

    #[test]
    fn only_an_add_carries_a_descriptor() {
        let uid = || fixture::uid("u");
        assert!(Message::del(uid()).descriptor().is_none());
        assert!(Snapshot::open().keep(uid()).descriptor().is_none());
        assert!(Snapshot::open().end().descriptor().is_none());
    }
}
