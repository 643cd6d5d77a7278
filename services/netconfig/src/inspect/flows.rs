//! Distinguishes connections of ztunnel or a sidecar from connections bypassing the proxy.

use std::{collections::BTreeSet, net::SocketAddr};

use super::{
    Proxies,
    tcp::{Socket, State},
};
use crate::{
    marks::{FROM_ZTUNNEL, OUTBOUND_PORT, ZTUNNEL_DNS_PORT, ZTUNNEL_PORTS},
    rules::sidecar::PASSTHROUGH_V6,
};

/// ztunnel's ports for outbound connections, on which the remote address of a socket is the application's.
const OUTBOUND_PORTS: [u16; 2] = [OUTBOUND_PORT, ZTUNNEL_DNS_PORT];

/// Counts sockets on ztunnel's ports, and sockets accepted by TPROXY, which keep the port addressed by the client.
pub(super) fn captured(sockets: &[Socket]) -> u32 {
    let ends = ends_of(sockets);
    count(established(sockets).filter(|socket| {
        ZTUNNEL_PORTS.contains(&socket.local.port()) || is_captured_by_tproxy(socket, &ends)
    }))
}

/// Counts connections that bypass ztunnel or a sidecar. Excluded are ztunnel's own (by port or mark), a sidecar's
/// (by user), connections with both ends in the pod, such as ztunnel's to the application from a client's address,
/// and the application's end of connections redirected to ztunnel.
pub(super) fn direct(sockets: &[Socket], proxies: &Proxies) -> u32 {
    let ends = ends_of(sockets);
    let captured_outbound: BTreeSet<_> = established(sockets)
        .filter(|socket| OUTBOUND_PORTS.contains(&socket.local.port()))
        .map(|socket| socket.remote)
        .collect();
    count(established(sockets).filter(|socket| {
        !is_loopback(socket)
            && !is_ztunnels(socket)
            && !proxies.own(socket)
            && !is_between(socket, &ends)
            && !socket.is_transparent
            && !captured_outbound.contains(&socket.local)
    }))
}

/// Returns whether the connection may leave the netns without ztunnel or a sidecar, judging by the local socket
/// alone.
pub(super) fn bypasses_proxy(socket: &Socket, proxies: &Proxies) -> bool {
    !is_loopback(socket) && !is_ztunnels(socket) && !proxies.own(socket) && !socket.is_transparent
}

/// Returns whether the socket seems to belong to ztunnel or a sidecar's proxy, judging by properties that take NET_RAW
/// or the proxy's user. Excludes translated connections, which conntrack identifies.
pub(super) fn is_proxied(socket: &Socket, proxies: &Proxies) -> bool {
    is_marked(socket) || proxies.own(socket) || socket.is_transparent
}

/// Selects, from sockets with ztunnel's mark, connections with hosts outside of the pod that were opened in none of
/// ztunnel's cgroups. On a kernel without cgroups of version 2, selects none.
pub(super) fn marked_by_others(sockets: Vec<Socket>, ztunnels: &BTreeSet<u64>) -> Vec<Socket> {
    let ends: Ends = sockets
        .iter()
        .map(|socket| (socket.local, socket.remote))
        .collect();
    let is_others = |socket: &Socket| {
        let is_foreign = socket.cgroup.is_some_and(|id| !ztunnels.contains(&id));
        is_foreign && !is_loopback(socket) && !is_between(socket, &ends)
    };
    sockets.into_iter().filter(is_others).collect()
}

fn established(sockets: &[Socket]) -> impl Iterator<Item = &Socket> {
    sockets
        .iter()
        .filter(|socket| socket.state == State::Established)
}

type Ends = BTreeSet<(SocketAddr, SocketAddr)>;

fn ends_of(sockets: &[Socket]) -> Ends {
    established(sockets)
        .map(|socket| (socket.local, socket.remote))
        .collect()
}

fn is_between(socket: &Socket, ends: &Ends) -> bool {
    ends.contains(&(socket.remote, socket.local))
}

/// Returns whether TPROXY delivered the connection. Excludes a proxy's transparent connections to the application
/// without IP_FREEBIND, because both ends of such a connection are in the netns.
fn is_captured_by_tproxy(socket: &Socket, ends: &Ends) -> bool {
    socket.is_transparent && !is_loopback(socket) && !is_between(socket, ends)
}

/// Returns whether an end is a loopback address. Includes the source of a sidecar's calls to the application, whose
/// IPv6 address is not a loopback address.
fn is_loopback(socket: &Socket) -> bool {
    [socket.local, socket.remote]
        .iter()
        .any(|end| end.ip().is_loopback() || end.ip() == PASSTHROUGH_V6)
}

/// Returns whether the socket is ztunnel's.
fn is_ztunnels(socket: &Socket) -> bool {
    let port = socket.local.port();
    ZTUNNEL_PORTS.contains(&port) || port == ZTUNNEL_DNS_PORT || is_marked(socket)
}

pub(super) fn is_marked(socket: &Socket) -> bool {
    let is_ztunnels = |mark| mark & FROM_ZTUNNEL.mask() == FROM_ZTUNNEL.value();
    socket.mark.is_some_and(is_ztunnels)
}

fn count<'a>(sockets: impl Iterator<Item = &'a Socket>) -> u32 {
    sockets.count().try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direct(sockets: &[Socket]) -> u32 {
        super::direct(sockets, &Proxies::default())
    }

    const POD: &str = "10.9.0.1";
    const CLIENT: &str = "10.9.0.2:40000";
    const SERVER: &str = "10.9.0.3:80";

    fn socket(local: &str, remote: &str) -> Socket {
        Socket {
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            state: State::Established,
            mark: Some(0),
            user: 0,
            is_transparent: false,
            inode: 0,
            cgroup: None,
        }
    }

    fn transparent(local: &str, remote: &str) -> Socket {
        Socket {
            is_transparent: true,
            ..socket(local, remote)
        }
    }

    fn at(port: u16) -> String {
        format!("{POD}:{port}")
    }

    #[test]
    fn a_connection_with_somebody_outside_is_direct_in_both_directions_and_families() {
        let sockets = [
            socket(&at(8080), CLIENT),
            socket(&at(51000), SERVER),
            socket("[fd09::1]:8080", "[fd09::2]:40000"),
        ];
        assert_eq!((direct(&sockets), captured(&sockets)), (3, 0));
    }

    #[test]
    fn what_only_bears_a_port_of_ztunnels_is_not_carried() {
        let proxied = |socket: &Socket| is_proxied(socket, &Proxies::of([1337]));
        let port = socket(&at(15006), CLIENT);
        assert!(!proxied(&port));
        for change in [
            Socket {
                mark: Some(FROM_ZTUNNEL.value()),
                ..port
            },
            Socket { user: 1337, ..port },
            Socket {
                is_transparent: true,
                ..port
            },
        ] {
            assert!(proxied(&change), "{change:?}");
        }
    }

    #[test]
    fn what_is_not_established_does_not_count() {
        for state in [State::Listening, State::Other] {
            let socket = Socket {
                state,
                ..socket(&at(15006), CLIENT)
            };
            assert_eq!((direct(&[socket]), captured(&[socket])), (0, 0));
        }
    }

    #[test]
    fn loopback_is_not_direct() {
        for ends in [("127.0.0.1:1", "127.0.0.9:2"), ("[::1]:1", "[::1]:2")] {
            assert_eq!(direct(&[socket(ends.0, ends.1)]), 0);
        }
        // One loopback end is enough to exclude a connection.
        assert_eq!(direct(&[socket("127.0.0.1:1", SERVER)]), 0);
    }

    #[test]
    fn a_connection_on_a_port_of_ztunnels_is_captured_and_not_direct() {
        for port in ZTUNNEL_PORTS {
            let sockets = [socket(&at(port), CLIENT)];
            assert_eq!((direct(&sockets), captured(&sockets)), (0, 1), "{port}");
        }
        assert_eq!(direct(&[socket(&at(15053), CLIENT)]), 0);
        // The port of ztunnel belongs to another host.
        assert_eq!(direct(&[socket(&at(51000), "10.9.0.3:15008")]), 1);
    }

    #[test]
    fn what_tproxy_took_on_is_captured_and_not_direct_on_any_port() {
        for (local, client) in [
            (&*at(8080), CLIENT),
            (&at(15006), CLIENT),
            ("[fd09::1]:8080", "[fd09::2]:40000"),
        ] {
            let taken = [transparent(local, client)];
            assert_eq!((direct(&taken), captured(&taken)), (0, 1), "{local}");
        }
    }

    #[test]
    fn what_a_proxy_opens_to_the_application_for_a_client_is_not_captured_again() {
        let sockets = [
            transparent(&at(8080), CLIENT),
            transparent("10.9.0.2:41000", &at(8080)),
            socket(&at(8080), "10.9.0.2:41000"),
            transparent("127.0.0.1:8080", "127.0.0.1:40000"),
        ];
        assert_eq!((direct(&sockets), captured(&sockets)), (0, 1));
    }

    #[test]
    fn what_bears_ztunnels_mark_is_not_direct_whatever_the_bits_of_others_are() {
        let marked = |mark| Socket {
            mark,
            ..socket(&at(51000), "10.9.0.3:15008")
        };
        for (mark, wanted) in [
            (Some(0x539), 0),
            (Some(0xa000_0539), 0),
            (Some(0x111), 1),
            (None, 1),
        ] {
            assert_eq!(direct(&[marked(mark)]), wanted, "{mark:x?}");
        }
    }

    #[test]
    fn a_connection_of_which_both_ends_are_here_is_not_direct() {
        // One connection is ztunnel's from a client's address, the other is the pod calling itself.
        let sockets = [
            socket(CLIENT, &at(8080)),
            socket(&at(8080), CLIENT),
            socket(&at(51000), &at(8080)),
            socket(&at(8080), &at(51000)),
        ];
        assert_eq!(direct(&sockets), 0);
        assert_eq!(direct(&sockets[..1]), 1);
    }

    #[test]
    fn what_was_led_to_ztunnel_on_its_way_out_is_not_direct() {
        for (port, target) in [(15001, SERVER), (15053, "10.96.0.10:53")] {
            let application = socket(&at(51000), target);
            let ztunnel = socket(&format!("127.0.0.1:{port}"), &at(51000));
            assert_eq!(direct(&[application, ztunnel]), 0, "{port}");
            assert_eq!(direct(&[application]), 1, "{port}");
        }
        // Another connection of the application stays direct.
        let ztunnel = socket("127.0.0.1:15001", &at(51000));
        assert_eq!(direct(&[socket(&at(51001), SERVER), ztunnel]), 1);
    }

    #[test]
    fn what_a_sidecar_opens_is_not_direct_and_what_others_open_is() {
        let of = |user| Socket {
            user,
            ..socket(&at(51000), SERVER)
        };
        let proxies = Proxies::of([1337, 2000]);
        for (user, wanted) in [(1337, 0), (2000, 0), (1000, 1)] {
            let sockets = [of(user)];
            assert_eq!(super::direct(&sockets, &proxies), wanted, "{user:?}");
            assert_eq!(bypasses_proxy(&of(user), &proxies), wanted == 1, "{user:?}");
        }
        assert_eq!(direct(&[of(1337)]), 1, "where no sidecar is");
    }

    #[test]
    fn a_sidecars_call_of_the_application_is_not_direct_at_either_end() {
        for ends in [
            ("127.0.0.6:40000", "10.9.0.1:8080"),
            ("[::6]:40000", "[fd09::1]:8080"),
        ] {
            for (local, remote) in [ends, (ends.1, ends.0)] {
                let socket = socket(local, remote);
                assert_eq!(direct(&[socket]), 0, "{local}");
                assert!(!bypasses_proxy(&socket, &Proxies::default()), "{local}");
            }
        }
    }
}
