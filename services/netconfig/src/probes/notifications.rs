//! Notifications of changes to the node's nf_tables.

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

/// NFNLGRP_NFTABLES as a bit of nl_groups (netlink(7)).
const NFTABLES_GROUP: u32 = 1 << (7 - 1);
/// NFNL_SUBSYS_NFTABLES, the upper byte of a message's type.
const NFTABLES_SUBSYSTEM: u8 = 10;
/// Length of struct nlmsghdr. Types below NLMSG_MIN_TYPE, such as NLMSG_OVERRUN, are netlink's own.
const HEADER_BYTES: usize = 16;
/// The same as NFTA_CHAIN_TABLE, NFTA_RULE_TABLE, NFTA_SET_TABLE and NFTA_SET_ELEM_LIST_TABLE.
const NFTA_TABLE_NAME: u16 = 1;
/// Exceeds the kernel's datagrams (nft_commit_notify in net/netfilter/nf_tables_api.c fills a page).
const RECEIVE_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct NftNotifications {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notification {
    /// No relevant change until the timeout.
    None,
    Change,
    /// Some were dropped by the kernel.
    Loss,
}

impl NftNotifications {
    /// Opens it in the calling thread's netns. Needs NET_ADMIN.
    pub(crate) fn open() -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkNetFilter,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, NFTABLES_GROUP))?;
        Ok(Self {
            fd,
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// Passes `is_relevant` the table's family, its name, and the netlink port of the socket that changed it.
    pub(crate) fn wait(
        &mut self,
        timeout: Duration,
        is_relevant: impl Fn(u8, &str, u32) -> bool,
    ) -> io::Result<Notification> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.drain(&is_relevant)? {
                Notification::None => {}
                notification @ (Notification::Change | Notification::Loss) => {
                    return Ok(notification);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Notification::None);
            }
            let milliseconds = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let mut waiting = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut waiting, milliseconds) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn drain(&mut self, is_relevant: &impl Fn(u8, &str, u32) -> bool) -> io::Result<Notification> {
        let mut notification = Notification::None;
        loop {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Err(nix::Error::EAGAIN) => return Ok(notification),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::ENOBUFS) => notification = Notification::Loss,
                Err(errno) => return Err(errno.into()),
                Ok(length) => match self.buffer.get(..length) {
                    None => notification = Notification::Loss,
                    Some(bytes)
                        if notification == Notification::None
                            && any_relevant(bytes, is_relevant) =>
                    {
                        notification = Notification::Change;
                    }
                    Some(_) => {}
                },
            }
        }
    }
}

fn any_relevant(mut bytes: &[u8], is_relevant: &impl Fn(u8, &str, u32) -> bool) -> bool {
    while let Some((length, message)) = parse_message(bytes) {
        if message.is_some_and(|(family, table, port)| is_relevant(family, table, port)) {
            return true;
        }
        bytes = bytes.get(nla_align_up(length)..).unwrap_or_default();
    }
    false
}

type Message<'a> = (u8, &'a str, u32);

/// Returns the first message's length, and its content if it concerns a table.
fn parse_message(bytes: &[u8]) -> Option<(usize, Option<Message<'_>>)> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let [l0, l1, l2, l3, _, subsystem, .., p0, p1, p2, p3] = *header;
    let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
    let payload = bytes.get(HEADER_BYTES..length)?;
    let message = || {
        let (&[family, ..], attributes) = payload.split_first_chunk::<4>()?;
        let name = CStr::from_bytes_until_nul(find_attr(attributes, NFTA_TABLE_NAME)?).ok()?;
        Some((
            family,
            name.to_str().ok()?,
            u32::from_ne_bytes([p0, p1, p2, p3]),
        ))
    };
    let is_ours = subsystem == NFTABLES_SUBSYSTEM;
    Some((length, is_ours.then(message).flatten()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(subsystem: u8, port: u32, family: u8, table: &str) -> Vec<u8> {
        let name = [table.as_bytes(), &[0]].concat();
        let mut payload = vec![family, 0, 0, 0];
        payload.extend(u16::try_from(4 + name.len()).unwrap().to_ne_bytes());
        payload.extend(NFTA_TABLE_NAME.to_ne_bytes());
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
        any_relevant(bytes, &|family, table, port| {
            (family, table, port) == (1, "inpod-host", 7)
        })
    }

    #[test]
    fn a_change_is_told_by_family_table_and_port_wherever_it_stands() {
        let ours = frame(NFTABLES_SUBSYSTEM, 7, 1, "inpod-host");
        assert!(is_heard(&ours));
        assert!(is_heard(
            &[frame(NFTABLES_SUBSYSTEM, 7, 2, "nat"), ours].concat()
        ));
        assert!(!is_heard(&frame(NFTABLES_SUBSYSTEM, 8, 1, "inpod-host")));
        assert!(!is_heard(&frame(NFTABLES_SUBSYSTEM, 7, 1, "inpod-hosts")));
        assert!(!is_heard(&frame(1, 7, 1, "inpod-host")));
    }

    #[test]
    fn what_is_cut_off_or_of_length_zero_is_no_message() {
        let ours = frame(NFTABLES_SUBSYSTEM, 7, 1, "inpod-host");
        assert!(!is_heard(&ours[..20]));
        assert!(!is_heard(&[0; 64]));
        assert!(!is_heard(&[]));
    }
}
