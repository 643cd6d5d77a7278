//! Encodes and decodes the message header (linux/netlink.h): length, type, flags, sequence number, port.

use std::{io, ops::RangeInclusive};

use netlink_bindings::{
    traits::{NetlinkRequest, Protocol},
    utils::{align, find_attr, nla_align_up},
};

use super::KernelError;

/// NLMSG_ERROR, which is an acknowledgement if the error number is 0.
const ERROR: u16 = 2;
/// NLMSG_DONE, the end of a dump.
const DONE: u16 = 3;

const REQUEST: u16 = 0x1; // NLM_F_REQUEST
const ACK: u16 = 0x4; // NLM_F_ACK
/// NLM_F_DUMP_INTR, which means that the objects changed during the dump.
const INTERRUPTED: u16 = 0x10;
pub(super) const DUMP: u16 = 0x300; // NLM_F_DUMP
/// NLM_F_ACK_TLVS, which means that attributes follow the error.
const ACK_ATTRIBUTES: u16 = 0x200;

/// NLMSGERR_ATTR_MSG, the kernel's message.
const ERROR_TEXT: u16 = 1;

const FLAGS: std::ops::Range<usize> = 6..8;

const HEADER_BYTES: usize = 16;

/// A batch of messages, of which the kernel acknowledges one.
#[derive(Debug)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    first: u32,
    last: u32,
    last_offset: usize,
    acknowledged: Option<u32>,
}

impl Batch {
    /// Creates a batch that numbers messages from `sequence + 1`.
    pub(super) fn after(sequence: u32) -> Self {
        Self {
            bytes: Vec::new(),
            first: sequence.wrapping_add(1),
            last: sequence,
            last_offset: 0,
            acknowledged: None,
        }
    }

    pub(crate) fn push<R: NetlinkRequest>(&mut self, request: &R) {
        self.push_with(request, 0);
    }

    pub(crate) fn acknowledge_last(&mut self) {
        let flags = self.bytes.get_mut(self.last_offset..);
        let flags = flags.and_then(|bytes| bytes.get_mut(FLAGS)?.first_chunk_mut::<2>());
        if let Some(flags) = flags {
            *flags = (u16::from_ne_bytes(*flags) | ACK).to_ne_bytes();
            self.acknowledged = Some(self.last);
        }
    }

    pub(super) fn push_with<R: NetlinkRequest>(&mut self, request: &R, flags: u16) {
        let kind = match request.protocol() {
            Protocol::Raw { request_type, .. } => request_type,
            // inpod uses no generic netlink, whose family ids would have to be resolved.
            Protocol::Generic(_) => 0,
        };
        self.last = self.last.wrapping_add(1);
        let length = HEADER_BYTES.saturating_add(request.payload().len());
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let flags = flags | request.flags() | REQUEST;
        self.last_offset = self.bytes.len();
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(flags.to_ne_bytes());
        self.bytes.extend(self.last.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(request.payload());
        align(&mut self.bytes);
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn numbers(&self) -> RangeInclusive<u32> {
        self.first..=self.last
    }

    pub(super) fn last(&self) -> u32 {
        self.last
    }

    pub(super) fn contains(&self, sequence: u32) -> bool {
        self.numbers().contains(&sequence)
    }

    pub(super) fn is_acknowledged_at(&self, sequence: u32) -> bool {
        self.acknowledged == Some(sequence)
    }

    /// Returns whether an error with this number ends the transaction: the error is about the acknowledged message,
    /// or about the whole batch, with the number of its first message (nfnetlink_rcv_batch in
    /// net/netfilter/nfnetlink.c).
    pub(super) fn ends_with(&self, sequence: u32) -> bool {
        self.first == sequence || self.is_acknowledged_at(sequence)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    kind: u16,
    flags: u16,
    pub(super) sequence: u32,
    pub(super) payload: &'a [u8],
}

#[derive(Debug)]
pub(super) enum Answer {
    Ack,
    Error(Refusal),
    Done,
    Data,
}

#[derive(Debug)]
pub(super) struct Refusal {
    errno: i32,
    error_text: Option<String>,
}

impl Refusal {
    pub(super) fn into_error(self, act: &str) -> KernelError {
        let source = io::Error::from_raw_os_error(self.errno);
        match self.error_text {
            Some(text) => KernelError::new(format!("{act} ({text})"), source),
            None => KernelError::new(act, source),
        }
    }
}

impl Message<'_> {
    pub(super) fn is_interrupted(&self) -> bool {
        self.flags & INTERRUPTED != 0
    }

    pub(super) fn answer(&self) -> Answer {
        match (self.kind, self.errno()) {
            (ERROR, 0) => Answer::Ack,
            (DONE, 0) => Answer::Done,
            (ERROR | DONE, errno) => Answer::Error(Refusal {
                errno,
                error_text: self.error_text(),
            }),
            _ => Answer::Data,
        }
    }

    /// Returns the error number, which the kernel sends negated.
    fn errno(&self) -> i32 {
        let bytes = self.payload.first_chunk().copied().unwrap_or_default();
        i32::from_ne_bytes(bytes).saturating_neg()
    }

    /// Returns the kernel's message from the attributes, which directly follow the error number and the request's
    /// header because copies of requests are disabled.
    fn error_text(&self) -> Option<String> {
        if self.flags & ACK_ATTRIBUTES == 0 {
            return None;
        }
        let attributes = self.payload.get(4 + HEADER_BYTES..)?;
        let text = find_attr(attributes, ERROR_TEXT)?;
        let text = String::from_utf8_lossy(text);
        Some(text.trim_end_matches('\0').to_owned())
    }
}

/// Splits the result of one read into messages.
pub(super) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let (message, length) = parse(bytes)?;
        bytes = bytes.get(nla_align_up(length)..).unwrap_or_default();
        Some(message)
    })
}

fn parse(bytes: &[u8]) -> Option<(Message<'_>, usize)> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = *header;
    let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
    let message = Message {
        kind: u16::from_ne_bytes([k0, k1]),
        flags: u16::from_ne_bytes([f0, f1]),
        sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
        payload: bytes.get(HEADER_BYTES..length)?,
    };
    Some((message, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER_BYTES + payload.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(0_u16.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        align(&mut bytes);
        bytes
    }

    #[test]
    fn messages_of_one_read_are_split_at_their_padding() {
        let bytes = [frame(100, 1, b"abc"), frame(101, 2, b"d")].concat();
        let found: Vec<_> = messages(&bytes).map(|m| (m.sequence, m.payload)).collect();
        assert_eq!(found, [(1, &b"abc"[..]), (2, &b"d"[..])]);
    }

    #[test]
    fn a_message_that_claims_more_than_was_read_ends_the_list() {
        let mut bytes = frame(100, 1, b"abcd");
        bytes.truncate(18);
        assert_eq!(messages(&bytes).count(), 0);
    }

    #[test]
    fn a_message_of_length_zero_does_not_loop() {
        assert_eq!(messages(&[0; 64]).count(), 0);
    }

    #[test]
    fn an_error_of_number_zero_is_an_acknowledgement() {
        let bytes = frame(ERROR, 1, &[0; 20]);
        let answers: Vec<_> = messages(&bytes).map(|m| m.answer()).collect();
        assert!(matches!(answers[..], [Answer::Ack]), "{answers:?}");
    }
}
