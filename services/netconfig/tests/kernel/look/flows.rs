//! Connections that bypass ztunnel, on real sockets.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use netconfig::{
    inspect::{self, Proxies},
    rules::{InboundCapture, Redirection, Sidecar},
};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::scenarios;
use crate::support::{Fresh, ambient, mark_as_ztunnel, plain, sandbox};

/// The first IPv6 packet over a new link may have to be sent again.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The mark of ztunnel's own packets.
const FROM_ZTUNNEL: u32 = 0x539;

/// The pod's and its neighbor's, per family.
const ADDRESSES: [[&str; 2]; 2] = [["10.9.0.1", "10.9.0.2"], ["fd09::1", "fd09::2"]];

fn pod_and_host() -> (Fresh, Fresh) {
    let (pod, host) = (Fresh::new(), Fresh::new());
    let path = host.netns.path().to_str().unwrap().to_owned();
    let task = path.split('/').nth(4).unwrap();
    pod.ip(&format!(
        "link add eth0 type veth peer name eth0 netns {task}"
    ));
    let [v4, v6] = ADDRESSES;
    for (fresh, v4, v6) in [(&pod, v4[0], v6[0]), (&host, v4[1], v6[1])] {
        fresh.ip(&format!("addr add {v4}/24 dev eth0"));
        fresh.ip(&format!("addr add {v6}/64 dev eth0 nodad"));
        fresh.ip("link set eth0 up");
    }
    (pod, host)
}

fn listen(fresh: &Fresh, port: u16) -> TcpListener {
    fresh.run(move || TcpListener::bind(("::", port)).unwrap())
}

/// Transparent, as ztunnel sets it where it may (services/docs/facts/ztunnel.md, 8).
fn listen_for_others(fresh: &Fresh, port: u16) -> TcpListener {
    let listener = listen(fresh, port);
    SockRef::from(&listener)
        .set_ip_transparent_v6(true)
        .unwrap();
    listener
}

/// Both ends of a connection.
type Connection = [TcpStream; 2];

/// A given source address is used as by ztunnel (services/docs/facts/ztunnel.md, 8).
fn connect(
    fresh: &Fresh,
    from: Option<&str>,
    mark: u32,
    to: (&str, u16),
    at: &TcpListener,
) -> Connection {
    let from: Option<IpAddr> = from.map(|from| from.parse().unwrap());
    let to = SocketAddr::new(to.0.parse().unwrap(), to.1);
    let stream: TcpStream = fresh.run(move || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP));
        let socket = socket.unwrap();
        socket.set_mark(mark).unwrap();
        if let Some(from) = from {
            match from {
                IpAddr::V4(_) => {
                    socket.set_ip_transparent_v4(true).unwrap();
                    socket.set_freebind_v4(true).unwrap();
                }
                IpAddr::V6(_) => {
                    socket.set_ip_transparent_v6(true).unwrap();
                    socket.set_freebind_v6(true).unwrap();
                }
            }
            socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
        }
        let connected = socket.connect_timeout(&to.into(), TIMEOUT);
        assert!(
            connected.is_ok(),
            "{from:?} to {to}, mark {mark:#x}: {connected:?}"
        );
        socket.into()
    });
    let (accepted, peer) = at.accept().unwrap();
    assert_eq!(peer.port(), stream.local_addr().unwrap().port());
    [stream, accepted]
}

fn flows(pod: &Fresh) -> (u32, u32) {
    let sockets = inspect::sockets(&pod.netns, &Proxies::default()).unwrap();
    (sockets.captured_flows, sockets.direct_flows)
}

/// Waits, because a process of another test holds all sockets from its fork to its exec.
fn await_flows(pod: &Fresh, expected: (u32, u32)) {
    let deadline = Instant::now() + TIMEOUT;
    while flows(pod) != expected {
        assert!(Instant::now() < deadline, "{:?}", flows(pod));
        std::thread::yield_now();
    }
}

#[test]
fn direct_flows_are_those_from_before_the_rules_and_none_that_ztunnel_carries() {
    let (pod, host) = pod_and_host();
    let (application, server) = (listen(&pod, 8080), listen(&host, 80));
    let ztunnel = [15001, 15006, 15008].map(|port| listen(&pod, port));
    ztunnel.iter().for_each(mark_as_ztunnel);
    let [outbound, plaintext, hbone] = &ztunnel;
    let mut before = Vec::new();
    for [own, other] in ADDRESSES {
        before.push(connect(&pod, None, 0, (other, 80), &server));
        before.push(connect(&host, None, 0, (own, 8080), &application));
    }
    assert_eq!(flows(&pod), (0, 4));
    // Connections of the pod to itself.
    let mut more = Vec::new();
    for to in ["127.0.0.1", "::1", "10.9.0.1", "fd09::1"] {
        more.push(connect(&pod, None, 0, (to, 8080), &application));
    }
    assert_eq!(flows(&pod), (0, 4));
    plain()
        .apply(&pod.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    assert_eq!(flows(&pod), (0, 4));
    for [own, other] in ADDRESSES {
        // Captured connections of both directions, and ztunnel's for them: to the next hop, and to the application
        // with the client's address.
        more.push(connect(&pod, None, 0, (other, 80), outbound));
        more.push(connect(&pod, None, FROM_ZTUNNEL, (other, 80), &server));
        more.push(connect(&host, None, 0, (own, 8080), plaintext));
        more.push(connect(&host, None, 0, (own, 15008), hbone));
        more.push(connect(
            &pod,
            Some(other),
            FROM_ZTUNNEL,
            (own, 8080),
            &application,
        ));
    }
    assert_eq!(flows(&pod), (6, 4));
    drop(before);
    await_flows(&pod, (6, 0));
}

/// The local port is the application's; sockets that the proxy opens are transparent too.
#[test]
fn tproxy_connections_are_captured_and_the_proxys_are_not() {
    let (pod, host) = pod_and_host();
    let application = listen(&pod, 8080);
    let [outbound, plaintext] = [15001, 15006].map(|port| listen_for_others(&pod, port));
    let tproxy = Redirection::Sidecar(Sidecar {
        inbound_capture: InboundCapture::Tproxy,
        ..scenarios::sidecar::usual()
    });
    plain().apply(&pod.netns, &tproxy, &sandbox("c1")).unwrap();
    let (mut inbound, mut of_ztunnel, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for [own, other] in ADDRESSES {
        inbound.push(connect(&host, None, 0, (own, 8080), &plaintext));
        of_ztunnel.push(connect(
            &pod,
            Some(other),
            FROM_ZTUNNEL,
            (own, 8080),
            &application,
        ));
        others.push(connect(&pod, None, 0, (other, 80), &outbound));
    }
    for [_, taken] in &inbound {
        assert_eq!(taken.local_addr().unwrap().port(), 8080);
    }
    assert_eq!(flows(&pod), (4, 0));
    for (connections, left) in [(of_ztunnel, 4), (inbound, 2), (others, 0)] {
        drop(connections);
        await_flows(&pod, (left, 0));
    }
}
