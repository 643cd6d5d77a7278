//! Where connections really go, in a pod's netns and from a client in another one. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

mod support;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use netconfig::{apply::Phase, inspect};
use socket2::{Domain, Protocol, Socket, Type};

use support::{Fresh, ambient, plain, sandbox};

const PATIENCE: Duration = Duration::from_secs(2);

/// What ztunnel marks its own packets with.
const FROM_ZTUNNEL: u32 = 0x539;

/// The addresses of the pod and of the client, per family.
const ADDRESSES: [(&str, &str); 2] = [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")];

/// A pod with rules, and a client beside it.
fn pod_and_client() -> (Fresh, Fresh) {
    let (pod, client) = (Fresh::new(), Fresh::new());
    let task = client
        .netns
        .path()
        .to_str()
        .unwrap()
        .split('/')
        .nth(4)
        .unwrap()
        .to_owned();
    pod.ip(&format!(
        "link add eth0 type veth peer name eth0 netns {task}"
    ));
    for (fresh, v4, v6) in [
        (&pod, "10.9.0.1/24", "fd09::1/64"),
        (&client, "10.9.0.2/24", "fd09::2/64"),
    ] {
        fresh.ip(&format!("addr add {v4} dev eth0"));
        fresh.ip(&format!("addr add {v6} dev eth0 nodad"));
        fresh.ip("link set eth0 up");
    }
    plain()
        .apply(&pod.netns, &ambient(), &sandbox("c1"))
        .unwrap();
    (pod, client)
}

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// Listens on every address of both families, as ztunnel does.
fn listen(fresh: &Fresh, port: u16) -> TcpListener {
    fresh.run(move || TcpListener::bind(("::", port)).unwrap())
}

/// Connects, from an address of choice if one is given, with a mark if it is not 0.
fn dial(fresh: &Fresh, from: Option<IpAddr>, mark: u32, to: SocketAddr) -> Option<TcpStream> {
    fresh.run(move || {
        let kind = (Domain::for_address(to), Type::STREAM, Some(Protocol::TCP));
        let socket = Socket::new(kind.0, kind.1, kind.2).unwrap();
        socket.set_mark(mark).unwrap();
        if let Some(from) = from {
            match from {
                IpAddr::V4(_) => socket.set_ip_transparent_v4(true).unwrap(),
                IpAddr::V6(_) => socket.set_freebind_v6(true).unwrap(),
            }
            socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
        }
        socket.connect_timeout(&to.into(), PATIENCE).ok()?;
        Some(socket.into())
    })
}

/// Whether a connection to an address arrives at a listener, and whose it is there.
fn arrives(fresh: &Fresh, mark: u32, to: SocketAddr, at: &TcpListener) -> bool {
    let Some(stream) = dial(fresh, None, mark, to) else {
        return false;
    };
    let local = stream.local_addr().unwrap();
    let (_, peer) = at.accept().unwrap();
    peer.port() == local.port()
}

#[test]
fn inbound_tcp_goes_to_15006_but_what_is_for_15008_goes_there() {
    let (pod, client) = pod_and_client();
    let (plaintext, hbone) = (listen(&pod, 15006), listen(&pod, 15008));
    for (ip, _) in ADDRESSES {
        assert!(arrives(&client, 0, address(ip, 8080), &plaintext), "{ip}");
        assert!(arrives(&client, 0, address(ip, 15008), &hbone), "{ip}");
    }
}

#[test]
fn outbound_tcp_goes_to_15001_but_what_ztunnel_sends_goes_out() {
    let (pod, client) = pod_and_client();
    let (outbound, server) = (listen(&pod, 15001), listen(&client, 8080));
    for (_, ip) in ADDRESSES {
        assert!(arrives(&pod, 0, address(ip, 8080), &outbound), "{ip}");
        assert!(
            arrives(&pod, FROM_ZTUNNEL, address(ip, 8080), &server),
            "{ip}"
        );
        // Only our bits of the mark count.
        assert!(
            arrives(&pod, 0xa000_0000 | FROM_ZTUNNEL, address(ip, 8080), &server),
            "{ip}"
        );
    }
}

#[test]
fn loopback_and_the_pods_own_addresses_are_not_captured() {
    let (pod, _client) = pod_and_client();
    let application = listen(&pod, 8080);
    for ip in ["127.0.0.1", "127.0.0.2", "::1", "10.9.0.1", "fd09::1"] {
        assert!(arrives(&pod, 0, address(ip, 8080), &application), "{ip}");
    }
}

/// ztunnel opens a connection to the application in the name of the client. The application's answers are for the
/// client's address and come back to ztunnel all the same.
#[test]
fn answers_to_a_client_that_ztunnel_speaks_for_come_back_to_ztunnel() {
    let (pod, _client) = pod_and_client();
    let application = listen(&pod, 8080);
    for (ip, client) in ADDRESSES {
        let client: IpAddr = client.parse().unwrap();
        let ztunnel = dial(&pod, Some(client), FROM_ZTUNNEL, address(ip, 8080));
        let ztunnel = ztunnel.unwrap_or_else(|| panic!("no answer to {client}"));
        let (accepted, peer) = application.accept().unwrap();
        assert_eq!(peer.ip().to_canonical(), client);
        talk(&mut (ztunnel, accepted));
    }
}

/// Each is needed: this is what the test above would not show if it passed for another reason.
#[test]
fn without_mangle_rules_ip_rule_or_route_those_answers_are_lost() {
    let (pod, _client) = pod_and_client();
    let _application = listen(&pod, 8080);
    let client = Some("10.9.0.2".parse().unwrap());
    let answered = || dial(&pod, client, FROM_ZTUNNEL, address("10.9.0.1", 8080)).is_some();
    for (program, arguments) in [
        ("nft", "flush chain inet inpod-mangle prerouting"),
        ("nft", "flush chain inet inpod-mangle output"),
        ("ip", "rule del pref 32764"),
        ("ip", "route del local default dev lo table 100"),
    ] {
        assert!(answered());
        let arguments: Vec<_> = arguments.split(' ').collect();
        pod.command(program, &arguments);
        assert!(!answered(), "{program} {arguments:?}");
        assert!(
            plain()
                .apply(&pod.netns, &ambient(), &sandbox("c1"))
                .unwrap()
                .changed
        );
    }
}

#[test]
fn a_captured_connection_survives_a_new_apply_and_a_drain_and_new_ones_go_direct() {
    let (pod, client) = pod_and_client();
    let (ztunnel, application) = (listen(&pod, 15006), listen(&pod, 8080));
    let dial = || dial(&client, None, 0, address("10.9.0.1", 8080)).unwrap();
    let mut captured = (dial(), ztunnel.accept().unwrap().0);
    assert_eq!(inspect::captured_flows(&pod.netns).unwrap(), 1);
    talk(&mut captured);
    pod.nft("delete table inet inpod-mangle");
    assert!(
        plain()
            .apply(&pod.netns, &ambient(), &sandbox("c1"))
            .unwrap()
            .changed
    );
    talk(&mut captured);
    assert_eq!(
        plain()
            .remove(&pod.netns, &sandbox("c1"), Phase::Drain)
            .unwrap()
            .captured_flows,
        1
    );
    talk(&mut captured);
    let mut direct = (dial(), application.accept().unwrap().0);
    talk(&mut direct);
    assert_eq!(
        plain()
            .remove(&pod.netns, &sandbox("c1"), Phase::Final)
            .unwrap()
            .captured_flows,
        1
    );
}

fn talk((a, b): &mut (TcpStream, TcpStream)) {
    for (mut from, to) in [(&*a, &*b), (&*b, &*a)] {
        to.set_read_timeout(Some(PATIENCE)).unwrap();
        from.write_all(b"hello\n").unwrap();
        let mut line = String::new();
        BufReader::new(to).read_line(&mut line).unwrap();
        assert_eq!(line, "hello\n");
    }
}
