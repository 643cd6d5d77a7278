//! Builds requests that netlink-bindings does not describe.

use netlink_bindings::traits::{NetlinkRequest, Protocol};

pub(crate) struct RawRequest {
    kind: u16,
    pub(crate) payload: Vec<u8>,
}

impl RawRequest {
    pub(crate) fn new(kind: u16, header: [u8; 4]) -> Self {
        let payload = header.to_vec();
        Self { kind, payload }
    }

    /// Appends an attribute: length with its header of four bytes, type, value, padding to four bytes.
    pub(crate) fn push(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len().saturating_add(4)).unwrap_or(u16::MAX);
        self.payload.extend(length.to_ne_bytes());
        self.payload.extend(kind.to_ne_bytes());
        self.payload.extend(value);
        let padded = self.payload.len().next_multiple_of(4);
        self.payload.resize(padded, 0);
        self
    }
}

impl NetlinkRequest for RawRequest {
    fn protocol(&self) -> Protocol {
        Protocol::Raw {
            // The socket has the protocol.
            protonum: 0,
            request_type: self.kind,
        }
    }

    fn flags(&self) -> u16 {
        0
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    type ReplyType<'buf> = ();

    fn decode_reply(_: &[u8]) {}
}
