//! Reads sockets by sock_diag(7).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use inpod_linux::Netns;
use netlink_bindings::{
    inet_diag::{self, IterableReplyAttrs, Msg, OpTcpDiagDump, ReqV2},
    traits::NetlinkRequest,
    utils::find_attr,
};
use nix::sys::socket::SockProtocol;

use super::{flows, tcp};
use crate::{
    inspect::InspectError,
    netlink::{KernelError, Socket},
};

const ACT: &str = "read the sockets";

const FAMILIES: [u8; 2] = [AF_INET, AF_INET6];
pub(super) const AF_INET: u8 = 2;
pub(super) const AF_INET6: u8 = 10;
pub(super) const TCP: u8 = 6; // IPPROTO_TCP
pub(super) const UDP: u8 = 17; // IPPROTO_UDP
/// TCP_ESTABLISHED (linux/tcp_states.h); for UDP, the state of connected sockets.
pub(super) const ESTABLISHED: u8 = 1;
/// TCP_CLOSE; for UDP, the state of sockets without a peer.
pub(super) const CLOSE: u8 = 7;
pub(super) const LISTEN: u8 = 10; // TCP_LISTEN

/// The states from the first to the last packet, which are all but TCP_TIME_WAIT, TCP_CLOSE and TCP_LISTEN.
const OPEN_STATES: [u8; 8] = [ESTABLISHED, 2, 3, 4, 5, 8, 9, 11];

/// The states that [`read`] returns.
const READ_STATES: [u8; 2] = [ESTABLISHED, LISTEN];

/// INET_DIAG_SOCKOPT: struct inet_diag_sockopt of linux/inet_diag.h, since Linux 5.10.
const OPTIONS: u16 = 22;
/// Bits of the first byte of struct inet_diag_sockopt.
const FREEBIND: u8 = bit_field(2);
const TRANSPARENT: u8 = bit_field(5);

/// INET_DIAG_CGROUP_ID: the identifier of a cgroup in the hierarchy of version 2, since Linux 5.8.
const CGROUP: u16 = 21;

/// Returns the mask of a bit field, which counts from the lowest bit on little-endian machines and from the highest
/// on others.
const fn bit_field(number: u8) -> u8 {
    if cfg!(target_endian = "little") {
        1 << number
    } else {
        0x80 >> number
    }
}

/// Returns the listening and established sockets of both families.
pub(super) fn read(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    dump(netns, TCP, &READ_STATES, tcp_socket)
}

/// Returns the same sockets as [`read`].
pub(super) fn read_on(socket: &mut Socket) -> Result<Vec<tcp::Socket>, KernelError> {
    dump_families(socket, TCP, &READ_STATES, tcp_socket)
}

/// Returns sockets with both endpoints, in any state between first and last packet.
pub(super) fn connections(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    dump(netns, TCP, &OPEN_STATES, tcp_socket)
}

/// Returns the sockets in the given states, of both families if the kernel has IPv6.
pub(super) fn dump<T>(
    netns: &Netns,
    protocol: u8,
    states: &[u8],
    socket_of: impl Fn(&Msg, &IterableReplyAttrs<'_>) -> T,
) -> Result<Vec<T>, InspectError> {
    let socket = netns.within(|| Socket::open(SockProtocol::NetlinkSockDiag))?;
    let mut socket = socket.map_err(|error| KernelError::new(ACT, error))?;
    Ok(dump_families(&mut socket, protocol, states, socket_of)?)
}

fn dump_families<T>(
    socket: &mut Socket,
    protocol: u8,
    states: &[u8],
    socket_of: impl Fn(&Msg, &IterableReplyAttrs<'_>) -> T,
) -> Result<Vec<T>, KernelError> {
    let mut found = Vec::new();
    for family in FAMILIES {
        found.extend(dump_family(socket, family, protocol, states, &socket_of)?);
    }
    Ok(found)
}

/// Returns the sockets of one family in the given states.
pub(super) fn dump_family<T>(
    socket: &mut Socket,
    family: u8,
    protocol: u8,
    states: &[u8],
    socket_of: impl Fn(&Msg, &IterableReplyAttrs<'_>) -> T,
) -> Result<Vec<T>, KernelError> {
    let header = ReqV2 {
        family,
        protocol,
        states: states.iter().fold(0, |mask, state| mask | 1 << state),
        ..ReqV2::new()
    };
    let request = inet_diag::Request::new().op_tcp_diag_dump(&header);
    socket.dump_some(ACT, &request, |payload| {
        let (message, attributes) = <OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(payload);
        Some(socket_of(&message, &attributes))
    })
}

pub(super) fn local(message: &Msg) -> SocketAddr {
    end(message.family, message.sockid.src, message.sockid.sport())
}

fn remote(message: &Msg) -> SocketAddr {
    end(message.family, message.sockid.dst, message.sockid.dport())
}

fn end(family: u8, address: [u8; 16], port: u16) -> SocketAddr {
    let [a, b, c, d, ..] = address;
    let address: IpAddr = if family == AF_INET {
        Ipv4Addr::new(a, b, c, d).into()
    } else {
        Ipv6Addr::from(address).into()
    };
    SocketAddr::new(address.to_canonical(), port)
}

/// Returns the connections with ztunnel's mark.
pub(super) fn marked_connections(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    let marked = |message: &Msg, attributes: &IterableReplyAttrs<'_>| {
        Some(tcp_socket(message, attributes)).filter(flows::is_marked)
    };
    let found = dump(netns, TCP, &OPEN_STATES, marked)?;
    Ok(found.into_iter().flatten().collect())
}

pub(super) fn cgroup(attributes: &IterableReplyAttrs<'_>) -> Option<u64> {
    let id = find_attr(attributes.get_buf(), CGROUP)?;
    id.try_into().ok().map(u64::from_ne_bytes)
}

fn tcp_socket(message: &Msg, attributes: &IterableReplyAttrs<'_>) -> tcp::Socket {
    tcp::Socket {
        local: local(message),
        remote: remote(message),
        state: match message.state {
            ESTABLISHED => tcp::State::Established,
            LISTEN => tcp::State::Listening,
            _ => tcp::State::Other,
        },
        // The kernel adds the mark unasked, but only for callers with CAP_NET_ADMIN (inet_diag_msg_attrs_fill in
        // net/ipv4/inet_diag.c).
        mark: attributes.get_mark().ok(),
        user: message.uid,
        is_transparent: is_transparent(attributes),
        inode: message.inode,
        cgroup: cgroup(attributes),
    }
}

fn is_transparent(attributes: &IterableReplyAttrs<'_>) -> bool {
    let options = find_attr(attributes.get_buf(), OPTIONS).and_then(<[u8]>::first);
    options.is_some_and(|options| options & (TRANSPARENT | FREEBIND) == TRANSPARENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_and_states_are_read_and_a_cut_off_message_is_no_socket_that_counts() {
        let mut message = Msg::new();
        message.family = AF_INET;
        message.sockid.set_sport(15006);
        message.sockid.src[..4].copy_from_slice(&[10, 9, 0, 1]);
        message.sockid.set_dport(40000);
        message.sockid.dst[..4].copy_from_slice(&[10, 9, 0, 2]);
        message.state = LISTEN;
        message.uid = 1337;
        let of = |payload: &[u8]| {
            let (message, attributes) =
                <OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(payload);
            tcp_socket(&message, &attributes)
        };
        let wanted = tcp::Socket {
            local: "10.9.0.1:15006".parse().unwrap(),
            remote: "10.9.0.2:40000".parse().unwrap(),
            state: tcp::State::Listening,
            mark: None,
            user: 1337,
            is_transparent: false,
            inode: 0,
            cgroup: None,
        };
        assert_eq!(of(message.as_slice()), wanted);
        assert_eq!(of(&message.as_slice()[..8]).state, tcp::State::Other);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn what_is_transparent_takes_what_is_for_others_unless_it_may_bind_to_any_address() {
        for (options, wanted) in [
            // The byte of an accepted socket on Linux 6.18 has is_icsk, mc_loop, transparent and mc_all set.
            (&[0b0111_0010, 0][..], true),
            (&[0b0111_0110, 0], false),
            (&[0b0101_0010, 0], false),
            // Later kernels may send more bytes, and old kernels send none.
            (&[0b0010_0000, 0, 0, 0], true),
            (&[], false),
        ] {
            let length = u16::try_from(options.len() + 4).unwrap();
            let attribute = [length, OPTIONS].map(u16::to_ne_bytes).concat();
            let payload = [Msg::new().as_slice(), &attribute, options].concat();
            let (message, attributes) =
                <OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(&payload);
            let found = tcp_socket(&message, &attributes).is_transparent;
            assert_eq!(found, wanted, "{options:?}");
        }
    }
}
