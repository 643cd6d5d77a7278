//! Changes of the node's own nf_tables, as the kernel tells them.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use netlink_bindings::utils::{find_attr, nla_align_up};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
    },
};

/// NFNLGRP_NFTABLES, as a bit of netlink(7)'s nl_groups.
const GROUP: u32 = 1 << (7 - 1);
/// NFNL_SUBSYS_NFTABLES: the upper byte of a message's kind.
const SUBSYSTEM: u8 = 10;
/// NLMSG_OVERRUN and others below NLMSG_MIN_TYPE are of netlink itself; the frame takes 16 bytes.
const HEADER_BYTES: usize = 16;
/// NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, NFTA_RULE_TABLE, NFTA_SET_TABLE, NFTA_SET_ELEM_LIST_TABLE: all the same.
const TABLE: u16 = 1;
/// More than the kernel puts into one datagram (nft_commit_notify in net/netfilter/nf_tables_api.c fills a page).
const RECEIVE_BYTES: usize = 64 * 1024;

/// A socket that hears them.
#[derive(Debug)]
pub(crate) struct Events {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

/// What was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Nothing that matters, until the time was over.
    Nothing,
    /// Something that matters.
    Change,
    /// That something was not heard.
    Loss,
}

impl Events {
    /// Of the calling thread's netns. Takes NET_ADMIN.
    pub(crate) fn open() -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkNetFilter,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, GROUP))?;
        Ok(Self {
            fd,
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// Waits for a change that matters: the table's family, its name, and the port of who changed it.
    pub(crate) fn wait(
        &mut self,
        patience: Duration,
        matters: impl Fn(u8, &str, u32) -> bool,
    ) -> io::Result<Heard> {
        let deadline = Instant::now() + patience;
        loop {
            match self.hear(&matters)? {
                Heard::Nothing => {}
                heard @ (Heard::Change | Heard::Loss) => return Ok(heard),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Heard::Nothing);
            }
            let milliseconds = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let mut waiting = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut waiting, milliseconds) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// All that has arrived.
    fn hear(&mut self, matters: &impl Fn(u8, &str, u32) -> bool) -> io::Result<Heard> {
        let mut heard = Heard::Nothing;
        loop {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Err(nix::Error::EAGAIN) => return Ok(heard),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::ENOBUFS) => heard = Heard::Loss,
                Err(errno) => return Err(errno.into()),
                Ok(length) => match self.buffer.get(..length) {
                    None => heard = Heard::Loss,
                    Some(bytes) if heard == Heard::Nothing && any(bytes, matters) => {
                        heard = Heard::Change;
                    }
                    Some(_) => {}
                },
            }
        }
    }
}

/// Whether any message of a datagram matters.
fn any(mut bytes: &[u8], matters: &impl Fn(u8, &str, u32) -> bool) -> bool {
    while let Some((length, message)) = first(bytes) {
        if message.is_some_and(|(family, table, port)| matters(family, table, port)) {
            return true;
        }
        bytes = bytes.get(nla_align_up(length)..).unwrap_or_default();
    }
    false
}

type Message<'a> = (u8, &'a str, u32);

/// The first message's length, and what it says if it is about a table.
fn first(bytes: &[u8]) -> Option<(usize, Option<Message<'_>>)> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let [l0, l1, l2, l3, _, subsystem, .., p0, p1, p2, p3] = *header;
    let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
    let payload = bytes.get(HEADER_BYTES..length)?;
    let message = || {
        let (&[family, ..], attributes) = payload.split_first_chunk::<4>()?;
        let name = CStr::from_bytes_until_nul(find_attr(attributes, TABLE)?).ok()?;
        Some((
            family,
            name.to_str().ok()?,
            u32::from_ne_bytes([p0, p1, p2, p3]),
        ))
    };
    let is_ours = subsystem == SUBSYSTEM;
    Some((length, is_ours.then(message).flatten()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(subsystem: u8, port: u32, family: u8, table: &str) -> Vec<u8> {
        let name = [table.as_bytes(), &[0]].concat();
        let mut payload = vec![family, 0, 0, 0];
        payload.extend(u16::try_from(4 + name.len()).unwrap().to_ne_bytes());
        payload.extend(TABLE.to_ne_bytes());
        payload.extend(name);
        let mut bytes = u32::try_from(16 + payload.len())
            .unwrap()
            .to_ne_bytes()
            .to_vec();
        bytes.extend([0, subsystem, 0, 0, 0, 0, 0, 0]);
        bytes.extend(port.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn is_heard(bytes: &[u8]) -> bool {
        any(bytes, &|family, table, port| {
            (family, table, port) == (1, "inpod-host", 7)
        })
    }

    #[test]
    fn a_change_is_told_by_family_table_and_port_wherever_it_stands() {
        let ours = frame(SUBSYSTEM, 7, 1, "inpod-host");
        assert!(is_heard(&ours));
        assert!(is_heard(&[frame(SUBSYSTEM, 7, 2, "nat"), ours].concat()));
        assert!(!is_heard(&frame(SUBSYSTEM, 8, 1, "inpod-host")));
        assert!(!is_heard(&frame(SUBSYSTEM, 7, 1, "inpod-hosts")));
        assert!(!is_heard(&frame(1, 7, 1, "inpod-host")));
    }

    #[test]
    fn what_is_cut_off_or_of_length_zero_is_no_message() {
        let ours = frame(SUBSYSTEM, 7, 1, "inpod-host");
        assert!(!is_heard(&ours[..20]));
        assert!(!is_heard(&[0; 64]));
        assert!(!is_heard(&[]));
    }
}
