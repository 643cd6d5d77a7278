//! Opens a netlink socket for change notifications.
//!
//! Of a notification, only the number of the request is read, because the resulting read shows the state.

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

/// NFNL_SUBSYS_NFTABLES and NFT_MSG_NEWGEN (linux/netfilter/nfnetlink.h, nf_tables.h).
const NEW_GENERATION: u16 = 10 << 8 | 15;

/// The size of a struct nlmsghdr: length, type, flags, number and port.
const HEADER_BYTES: usize = 16;

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

    pub(super) fn protocol(self) -> SockProtocol {
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
    /// A change by the request with the given number, in the netns with the given nsid; without an nsid, in the
    /// socket's own netns.
    Change(u32, Option<i32>),
    /// The buffer was full, and notifications are lost (ENOBUFS).
    Overrun,
    Empty,
}

/// A socket not registered with a runtime, which keeps its netns alive while open.
#[derive(Debug)]
pub(super) struct UnpolledSocket(OwnedFd, SockProtocol);

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
        if matches!(topic, Topic::Filter) {
            SockRef::from(&fd).attach_filter(&only_generations())?;
        }
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, topic.groups()))?;
        Ok(Self(fd, protocol))
    }

    /// Registers the socket with the calling task's runtime.
    #[expect(
        deprecated,
        reason = "its successor is an unsafe function; what that demands, a descriptor that stays open and the same, an OwnedFd is"
    )]
    pub(super) fn register(self) -> io::Result<Socket> {
        let interest = Interest::READABLE | Interest::ERROR;
        let registered = AsyncFd::with_interest(self.0, interest)?;
        Ok(Socket(registered, self.1))
    }
}

#[derive(Debug)]
pub(super) struct Socket(AsyncFd<OwnedFd>, SockProtocol);

impl Socket {
    pub(super) fn protocol(&self) -> SockProtocol {
        self.1
    }

    /// Waits until there may be messages.
    pub(super) async fn ready(&self) -> io::Result<()> {
        let mut guard = self.0.ready(Interest::READABLE | Interest::ERROR).await?;
        // New messages set readiness again, and the caller empties the socket.
        guard.clear_ready();
        Ok(())
    }

    pub(super) fn receive(&self) -> io::Result<Received> {
        match receive_message(self.0.get_ref()) {
            Ok((number, nsid)) => Ok(Received::Change(number, nsid)),
            Err(nix::Error::ENOBUFS) => Ok(Received::Overrun),
            Err(nix::Error::EAGAIN) => Ok(Received::Empty),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Accepts the last notification of each transaction of nf_tables (linux/filter.h), which has the new generation: the
/// type NFT_MSG_NEWGEN, the second half of the first eight bytes of the header.
fn only_generations() -> [SockFilter; 4] {
    const LOAD: u16 = 0x28; // BPF_LD | BPF_H | BPF_ABS
    const JUMP_IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    const TYPE: u32 = 4;
    // The filter loads 16-bit values in network order.
    let new_generation = u16::from_be_bytes(NEW_GENERATION.to_ne_bytes());
    [
        SockFilter::new(LOAD, 0, 0, TYPE),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, u32::from(new_generation)),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}

/// Receives one message and returns its number and nsid, while the kernel drops the part that exceeds the buffer.
fn receive_message(fd: &OwnedFd) -> nix::Result<(u32, Option<i32>)> {
    let mut header = [0; HEADER_BYTES];
    let mut control = cmsg_space!(i32);
    let nsid = loop {
        let mut buffers = [IoSliceMut::new(&mut header)];
        let flags = MsgFlags::MSG_DONTWAIT;
        match recvmsg::<()>(fd.as_raw_fd(), &mut buffers, Some(&mut control), flags) {
            Err(nix::Error::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(message) => break message.cmsgs()?.find_map(|control| parse_nsid(&control)),
        }
    };
    let [.., a, b, c, d, _, _, _, _] = header;
    Ok((u32::from_ne_bytes([a, b, c, d]), nsid))
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
