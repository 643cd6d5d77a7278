//! Parses a packet into a request, or into an error of the class that stock ztunnel assigns.

use std::os::fd::OwnedFd;

use prost::Message;

use crate::error::{ProtocolError, ReadError, RecvError};
use crate::proto::workload_request::Payload;
use crate::proto::{AddWorkload, WorkloadInfo, WorkloadRequest};

/// A request of the agent, which needs exactly one answer.
#[derive(Debug)]
pub enum Received {
    /// Start to serve this pod.
    Add {
        /// The UID of the pod, which may be empty: stock ztunnel treats an empty UID like any other.
        uid: String,
        /// The name and the identity of the pod.
        info: WorkloadInfo,
        /// The descriptor of the pod's network namespace, which is not verified yet.
        netns: OwnedFd,
    },
    /// Continue to serve this pod, if the ztunnel knows the pod.
    Keep {
        /// The UID of the pod.
        uid: String,
    },
    /// Stop serving this pod at once.
    Del {
        /// The UID of the pod.
        uid: String,
    },
    /// The agent has named every pod of the node: stop all other pods.
    SnapshotSent,
}

/// Parses a packet, and closes the descriptors that belong to no request.
pub(crate) fn parse(packet: &[u8], descriptors: Vec<OwnedFd>) -> Result<Received, RecvError> {
    let descriptor = at_most_one(descriptors)?;
    let request = WorkloadRequest::decode(packet).map_err(ReadError::from)?;
    match (request.payload.ok_or(ReadError::NoPayload)?, descriptor) {
        (Payload::Add(add), Some(netns)) => Ok(parse_add(add, netns)?),
        (Payload::Add(_), None) => Err(ReadError::NoDescriptor.into()),
        (_, Some(_)) => Err(ReadError::UnexpectedDescriptor.into()),
        (Payload::Keep(keep), None) => Ok(Received::Keep { uid: keep.uid }),
        (Payload::Del(del), None) => Ok(Received::Del { uid: del.uid }),
        (Payload::SnapshotSent(_), None) => Ok(Received::SnapshotSent),
    }
}

fn at_most_one(mut descriptors: Vec<OwnedFd>) -> Result<Option<OwnedFd>, ReadError> {
    match descriptors.len() {
        0 | 1 => Ok(descriptors.pop()),
        many => Err(ReadError::ManyDescriptors(many)),
    }
}

fn parse_add(add: AddWorkload, netns: OwnedFd) -> Result<Received, ProtocolError> {
    let info = add
        .workload_info
        .ok_or(ProtocolError::MissingWorkloadInfo)?;
    Ok(Received::Add {
        uid: add.uid,
        info,
        netns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // The packets were recorded from a peer of stock ztunnel.
    const ADD: &[u8] =
        b"\x0a\x25\x0a\x05uid-1\x12\x1c\x0a\x06client\x12\x07default\x1a\x09sa-client";
    const ADD_WITHOUT_INFO: &[u8] = b"\x0a\x07\x0a\x05uid-1";
    const DEL: &[u8] = b"\x12\x07\x12\x05uid-1";
    const SNAPSHOT_SENT: &[u8] = b"\x1a\x00";
    const KEEP: &[u8] = b"\x2a\x07\x0a\x05uid-1";

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        let open = || std::fs::File::open("/dev/null").expect("/dev/null").into();
        std::iter::repeat_with(open).take(count).collect()
    }

    fn error(packet: &[u8], count: usize) -> String {
        parse(packet, descriptors(count))
            .expect_err("parsed")
            .to_string()
    }

    #[test]
    fn an_add_is_parsed_with_its_info_and_descriptor() {
        let received = parse(ADD, descriptors(1)).expect("parse");
        let Received::Add { uid, info, .. } = received else {
            panic!("not an Add: {received:?}");
        };
        assert_eq!(uid, "uid-1");
        assert_eq!(info.name, "client");
        assert_eq!(info.namespace, "default");
        assert_eq!(info.service_account, "sa-client");
    }

    #[test]
    fn requests_without_a_descriptor_are_parsed() {
        assert!(matches!(parse(DEL, vec![]), Ok(Received::Del { uid }) if uid == "uid-1"));
        assert!(matches!(parse(KEEP, vec![]), Ok(Received::Keep { uid }) if uid == "uid-1"));
        assert!(matches!(
            parse(SNAPSHOT_SENT, vec![]),
            Ok(Received::SnapshotSent)
        ));
    }

    #[test]
    fn a_wrong_number_of_descriptors_is_a_read_error() {
        assert_eq!(
            error(ADD, 0),
            "failure to read message : No control message"
        );
        assert_eq!(
            error(ADD, 2),
            "failure to read message : Expected 1 FD, got 2"
        );
        let unexpected = "failure to read message : Unexpected control message";
        assert_eq!(error(DEL, 1), unexpected);
        assert_eq!(error(KEEP, 1), unexpected);
        assert_eq!(error(SNAPSHOT_SENT, 1), unexpected);
    }

    #[test]
    fn an_unknown_request_is_a_read_error() {
        let future = b"\x32\x07\x0a\x05uid-1";
        assert_eq!(error(future, 0), "failure to read message : no payload");
        assert_eq!(error(future, 1), "failure to read message : no payload");
    }

    #[test]
    fn garbage_is_a_read_error() {
        let prefix = "failure to read message : failed to decode Protobuf message";
        assert!(error(b"\xff\xff\xff", 0).starts_with(prefix));
        assert!(error(b"\x12\x04\x12\x02\xff\xfe", 0).starts_with(prefix));
    }

    #[test]
    fn no_workload_info_is_a_protocol_error() {
        assert_eq!(
            error(ADD_WITHOUT_INFO, 1),
            "failure to process message : ProtocolError(\"workload_info is required\")"
        );
    }

    #[test]
    fn unknown_fields_of_a_known_request_are_ignored() {
        let packet = b"\x12\x0a\x12\x05uid-1\x7a\x01x";
        assert!(matches!(parse(packet, vec![]), Ok(Received::Del { uid }) if uid == "uid-1"));
    }

    #[test]
    fn of_two_payloads_in_one_packet_the_last_wins() {
        let packet = [SNAPSHOT_SENT, DEL].concat();
        assert!(matches!(parse(&packet, vec![]), Ok(Received::Del { .. })));
    }
}
