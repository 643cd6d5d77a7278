//! TCP sockets by sock_diag(7): in a third of the time that `/proc/net/tcp` takes, since the kernel tells only of those
//! that are asked for.

use netlink_bindings::{
    inet_diag::{self, Msg, OpTcpDiagDump, ReqV2},
    traits::NetlinkRequest,
};
use netns::Netns;
use nix::sys::socket::SockProtocol;

use super::tcp;
use crate::{
    error::InspectError,
    netlink::{KernelError, Socket},
};

const ACT: &str = "read the TCP sockets";

/// AF_INET, AF_INET6.
const FAMILIES: [u8; 2] = [2, 10];
/// IPPROTO_TCP.
const TCP: u8 = 6;
/// TCP_ESTABLISHED (linux/tcp_states.h).
const ESTABLISHED: u8 = 1;
/// TCP_LISTEN.
const LISTEN: u8 = 10;

/// The sockets of a netns that listen or are established, of both families.
pub(super) fn read(netns: &Netns) -> Result<Vec<tcp::Socket>, InspectError> {
    let socket = netns.within(|| Socket::open(SockProtocol::NetlinkSockDiag))?;
    let mut socket = socket.map_err(|error| KernelError::new(ACT, error))?;
    let mut found = Vec::new();
    for family in FAMILIES {
        let header = ReqV2 {
            family,
            protocol: TCP,
            states: 1 << ESTABLISHED | 1 << LISTEN,
            ..ReqV2::new()
        };
        let request = inet_diag::Request::new().op_tcp_diag_dump(&header);
        for payload in socket.dump(ACT, &request)? {
            let (message, _) = <OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(&payload);
            found.push(socket_of(&message));
        }
    }
    Ok(found)
}

/// Whether an error says that the kernel is without sock_diag or its module for TCP: it may be built so, or load no
/// modules any more.
pub(super) fn is_missing(error: &InspectError) -> bool {
    let errnos = [nix::Error::ENOENT, nix::Error::EPROTONOSUPPORT];
    matches!(error, InspectError::Kernel(error) if errnos.iter().any(|errno| error.is(*errno)))
}

fn socket_of(message: &Msg) -> tcp::Socket {
    tcp::Socket {
        port: message.sockid.sport(),
        state: match message.state {
            ESTABLISHED => tcp::State::Established,
            LISTEN => tcp::State::Listening,
            _ => tcp::State::Other,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_states_are_read_and_a_cut_off_message_is_no_socket_that_counts() {
        let mut message = Msg::new();
        message.sockid.set_sport(15006);
        message.state = LISTEN;
        let of = |payload: &[u8]| {
            socket_of(&<OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(payload).0)
        };
        let wanted = tcp::Socket {
            port: 15006,
            state: tcp::State::Listening,
        };
        assert_eq!(of(message.as_slice()), wanted);
        assert_eq!(of(&message.as_slice()[..8]).state, tcp::State::Other);
    }

    #[test]
    fn only_a_kernel_without_it_is_read_another_way() {
        let error = |errno| InspectError::Kernel(KernelError::new(ACT, errno));
        assert!(is_missing(&error(nix::Error::ENOENT)));
        assert!(!is_missing(&error(nix::Error::EPERM)));
    }
}
