//! Opens a netlink socket for change notifications.
//!
//! The content of a notification is ignored, because the resulting read shows the state.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    cmsg_space, libc, setsockopt_impl, sockopt_impl,
    sys::socket::{
        AddressFamily, ControlMessageOwned, MsgFlags, NetlinkAddr, SockFlag, SockProtocol,
        SockType, bind, recvmsg, setsockopt, socket, sockopt,
    },
};
use socket2::{SockFilter, SockRef};
use tokio::io::{Interest, unix::AsyncFd};

use crate::netlink::own_port;

sockopt_impl!(
    /// Includes every netns with an nsid in the socket's netns (netlink(7)).
    ListenAllNsids,
    SetOnly,
    libc::SOL_NETLINK,
    libc::NETLINK_LISTEN_ALL_NSID,
    bool
);

/// The multicast groups of one socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Topic {
    /// Transactions of nf_tables, including iptables-nft.
    Filter,
    /// Changes of routes and ip rules, IPv4 and IPv6.
    Routing,
}

impl Topic {
    pub(super) const ALL: [Self; 2] = [Self::Filter, Self::Routing];

    fn protocol(self) -> SockProtocol {
        match self {
            Self::Filter => SockProtocol::NetlinkNetFilter,
            Self::Routing => SockProtocol::NetlinkRoute,
        }
    }

    /// Returns group n as bit n - 1 (linux/netfilter/nfnetlink.h, linux/rtnetlink.h).
    fn groups(self) -> u32 {
        let numbers: &[u32] = match self {
            // NFNLGRP_NFTABLES.
            Self::Filter => &[7],
            // RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_ROUTE, RTNLGRP_IPV6_RULE.
            Self::Routing => &[7, 8, 11, 19],
        };
        numbers
            .iter()
            .fold(0, |mask, number| mask | 1 << (number - 1))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A change in the netns with the given nsid; without an nsid, in the socket's own netns.
    Change(Option<i32>),
    /// The buffer was full, and notifications are lost (ENOBUFS).
    Overrun,
    Empty,
}

/// A socket not registered with a runtime, which keeps its netns alive while open.
#[derive(Debug)]
pub(super) struct UnpolledSocket(OwnedFd);

impl UnpolledSocket {
    /// Opens a socket in the calling thread's netns, for every netns with an nsid there.
    pub(super) fn open(topic: Topic, buffer_bytes: usize) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = topic.protocol();
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        setsockopt(&fd, ListenAllNsids, &true)?;
        // The forced size may exceed net.core.rmem_max, but root of a user namespace may not force a size.
        setsockopt(&fd, sockopt::RcvBufForce, &buffer_bytes)
            .or_else(|_| setsockopt(&fd, sockopt::RcvBuf, &buffer_bytes))?;
        SockRef::from(&fd).attach_filter(&all_but_own())?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, topic.groups()))?;
        Ok(Self(fd))
    }

    /// Registers the socket with the calling task's runtime.
    #[expect(
        deprecated,
        reason = "its successor is an unsafe function; what that demands, a descriptor that stays open and the same, an OwnedFd is"
    )]
    pub(super) fn register(self) -> io::Result<Socket> {
        let interest = Interest::READABLE | Interest::ERROR;
        AsyncFd::with_interest(self.0, interest).map(Socket)
    }
}

#[derive(Debug)]
pub(super) struct Socket(AsyncFd<OwnedFd>);

impl Socket {
    /// Waits until there may be messages.
    pub(super) async fn ready(&self) -> io::Result<()> {
        let mut guard = self.0.ready(Interest::READABLE | Interest::ERROR).await?;
        // New messages set readiness again, and the caller empties the socket.
        guard.clear_ready();
        Ok(())
    }

    pub(super) fn receive(&self) -> io::Result<Received> {
        match receive_message(self.0.get_ref()) {
            Ok(nsid) => Ok(Received::Change(nsid)),
            Err(nix::Error::ENOBUFS) => Ok(Received::Overrun),
            Err(nix::Error::EAGAIN) => Ok(Received::Empty),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Accepts notifications (linux/filter.h) unless their origin (`nlmsg_pid`, the last four bytes of the header) is
/// netconfig, which reads back its own changes.
fn all_but_own() -> [SockFilter; 4] {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const JUMP_IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    const ORIGIN: u32 = 12;
    // The filter loads 32-bit values in network order.
    let own = u32::from_be_bytes(own_port().to_ne_bytes());
    [
        SockFilter::new(LOAD, 0, 0, ORIGIN),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, own),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ]
}

/// Receives one message and returns its nsid, while the kernel drops the part that exceeds the buffer.
fn receive_message(fd: &OwnedFd) -> nix::Result<Option<i32>> {
    let mut byte = [0; 1];
    let mut control = cmsg_space!(i32);
    loop {
        let mut buffers = [IoSliceMut::new(&mut byte)];
        let flags = MsgFlags::MSG_DONTWAIT;
        match recvmsg::<()>(fd.as_raw_fd(), &mut buffers, Some(&mut control), flags) {
            Err(nix::Error::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(message) => {
                let found = message.cmsgs()?.find_map(|control| parse_nsid(&control));
                return Ok(found);
            }
        }
    }
}

fn parse_nsid(control: &ControlMessageOwned) -> Option<i32> {
    let ControlMessageOwned::Unknown(unknown) = control else {
        return None;
    };
    let header = unknown.cmsg_header;
    let is_nsid =
        (header.cmsg_level, header.cmsg_type) == (libc::SOL_NETLINK, libc::NETLINK_LISTEN_ALL_NSID);
    let bytes = unknown.data_bytes.first_chunk()?;
    is_nsid.then(|| i32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::UnknownCmsg;

    use super::*;

    fn control(level: i32, kind: i32, data: &[u8]) -> ControlMessageOwned {
        ControlMessageOwned::Unknown(UnknownCmsg {
            cmsg_header: libc::cmsghdr {
                cmsg_len: 16 + data.len(),
                cmsg_level: level,
                cmsg_type: kind,
            },
            data_bytes: data.to_vec(),
        })
    }

    #[test]
    fn the_number_of_a_message_is_in_its_control_message_of_that_kind() {
        let (level, kind) = (libc::SOL_NETLINK, libc::NETLINK_LISTEN_ALL_NSID);
        let data = 7_i32.to_ne_bytes();
        assert_eq!(parse_nsid(&control(level, kind, &data)), Some(7));
        assert_eq!(parse_nsid(&control(level, kind, &data[..3])), None);
        assert_eq!(parse_nsid(&control(level, kind + 1, &data)), None);
        assert_eq!(parse_nsid(&control(libc::SOL_SOCKET, kind, &data)), None);
        let another = ControlMessageOwned::ScmRights(Vec::new());
        assert_eq!(parse_nsid(&another), None);
    }

    #[test]
    fn groups_are_the_bits_of_the_kernels_masks() {
        let routing = libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV4_RULE | libc::RTMGRP_IPV6_ROUTE;
        let ipv6_rule = 1 << (libc::RTNLGRP_IPV6_RULE - 1);
        let wanted = u32::try_from(routing).unwrap() | ipv6_rule;
        assert_eq!(Topic::Routing.groups(), wanted);
        assert_eq!(Topic::Filter.groups(), 1 << (libc::NFNLGRP_NFTABLES - 1));
    }
}
