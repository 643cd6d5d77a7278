//! Assigns nsids. An nsid is the number by which one netns, and notifications received there, refer to another
//! netns.
//!
//! An nsid lasts as long as its netns and cannot be revoked; afterwards the kernel may reuse the number.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use inpod_linux::Netns;
use netlink_bindings::utils::find_attr;
use nix::{libc, sys::socket::SockProtocol};

use crate::netlink::{KernelError, RawRequest, Socket};

/// NETNSA_NSID and NETNSA_FD of linux/net_namespace.h.
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// NETNSA_NSID_NOT_ASSIGNED, which in a request stands for any free nsid, and in a reply for none.
const NSID_NOT_ASSIGNED: i32 = -1;
/// A struct rtgenmsg with padding, all zero (AF_UNSPEC).
const HEADER: [u8; 4] = [0; 4];

/// Assigns nsids in the netns in which it was opened.
#[derive(Debug)]
pub(super) struct NsidAssigner(Socket);

impl NsidAssigner {
    /// Opens a socket in the calling thread's netns.
    pub(super) fn open() -> io::Result<Self> {
        Socket::open(SockProtocol::NetlinkRoute).map(Self)
    }

    /// Returns the nsid of `netns`, and assigns an nsid if there is none.
    pub(super) fn nsid_of(&mut self, netns: &Netns) -> Result<i32, KernelError> {
        let act = "assign an nsid to the netns";
        match self
            .0
            .execute(act, &build_request(libc::RTM_NEWNSID, netns))
        {
            Err(error) if !error.is(nix::Error::EEXIST) => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let act = "read the nsid of the netns";
        let answer = self.0.get(act, &build_request(libc::RTM_GETNSID, netns))?;
        parse_nsid(&answer).ok_or_else(|| KernelError::new(act, nix::Error::ENOENT))
    }
}

fn parse_nsid(answer: &[u8]) -> Option<i32> {
    let bytes = find_attr(answer.get(HEADER.len()..)?, NETNSA_NSID)?;
    let nsid = i32::from_ne_bytes(*bytes.first_chunk()?);
    (nsid != NSID_NOT_ASSIGNED).then_some(nsid)
}

fn build_request(kind: u16, netns: &Netns) -> RawRequest {
    let descriptor = netns.as_fd().as_raw_fd();
    RawRequest::new(kind, HEADER)
        .push(NETNSA_FD, &descriptor.to_ne_bytes())
        .push(NETNSA_NSID, &NSID_NOT_ASSIGNED.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u16, number: i32) -> Vec<u8> {
        let answer = RawRequest::new(0, HEADER).push(kind, &number.to_ne_bytes());
        answer.payload
    }

    #[test]
    fn the_number_is_found_among_the_attributes() {
        assert_eq!(parse_nsid(&answer(NETNSA_NSID, 7)), Some(7));
        let after_another = [answer(NETNSA_FD, 3), answer(NETNSA_NSID, 0)[4..].to_vec()].concat();
        assert_eq!(parse_nsid(&after_another), Some(0));
    }

    #[test]
    fn a_netns_without_a_number_or_an_answer_that_is_cut_off_has_none() {
        assert_eq!(parse_nsid(&answer(NETNSA_NSID, NSID_NOT_ASSIGNED)), None);
        assert_eq!(parse_nsid(&answer(NETNSA_FD, 7)), None);
        let whole = answer(NETNSA_NSID, 7);
        for length in 0..whole.len() {
            assert_eq!(parse_nsid(&whole[..length]), None, "{length}");
        }
    }
}
