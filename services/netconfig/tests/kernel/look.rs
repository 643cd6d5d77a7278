//! Inspection of a netns: every kind of conflict, proven by packets, and flows. Needs root.

mod around;
mod chains;
mod flows;
mod listeners;
mod marked;

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use netconfig::conflicts::{Finding, Kind, find_conflicts};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::{Fresh, ambient, mark_as_ztunnel, plain, sandbox};

const TIMEOUT: Duration = Duration::from_secs(2);

/// The mark of ztunnel's own packets.
const FROM_ZTUNNEL: u32 = 0x539;

const POD: &str = "10.9.0.1";
const SERVER: &str = "10.9.0.2";

/// A pod with rules, and its gateway, a server beside it.
fn pod() -> (Fresh, Fresh) {
    let (pod, server) = (Fresh::new(), Fresh::new());
    connect(&pod, &server, "eth0", [POD, SERVER]);
    pod.ip(&format!("route add default via {SERVER}"));
    capture(&pod);
    (pod, server)
}

fn connect(pod: &Fresh, server: &Fresh, name: &str, [own, other]: [&str; 2]) {
    let path = server.netns.path().to_str().unwrap().to_owned();
    let task = path.split('/').nth(4).unwrap();
    pod.ip(&format!(
        "link add {name} type veth peer name {name} netns {task}"
    ));
    for (fresh, address) in [(pod, own), (server, other)] {
        fresh.ip(&format!("addr add {address}/24 dev {name}"));
        fresh.ip(&format!("link set {name} up"));
    }
}

fn capture(pod: &Fresh) {
    plain()
        .apply(&pod.netns, &ambient(), &sandbox("c1"))
        .unwrap();
}

/// Leaves out the missing listeners, because no ztunnel serves the pods here.
fn findings(pod: &Fresh) -> Vec<Finding> {
    let mut found = find_conflicts(&pod.netns, &[POD.parse().unwrap()]).unwrap();
    found.retain(|finding| finding.kind != Kind::ListenerMissing);
    found
}

/// There must be exactly this finding.
fn is_found(pod: &Fresh, kind: Kind, subject: &str, expected: &str) {
    let found = findings(pod);
    assert_eq!(found.len(), 1, "{found:#?}");
    for finding in &found {
        let place = (finding.kind, finding.subject.as_str());
        assert_eq!(place, (kind, subject), "{finding:?}");
        assert!(finding.sentence.contains(expected), "{finding:?}");
    }
}

fn is_clean(pod: &Fresh) {
    assert_eq!(findings(pod), []);
}

fn iptables(pod: &Fresh, arguments: &str) {
    let arguments: Vec<_> = arguments.split(' ').collect();
    pod.command("iptables-nft", &arguments);
}

fn sysctl(fresh: &Fresh, name: &str, value: &str) {
    let path = format!("/proc/sys/net/{name}");
    let value = value.to_owned();
    fresh.run(move || std::fs::write(path, value)).unwrap();
}

/// On ztunnel's ports, the listener is marked as ztunnel's.
fn listen(fresh: &Fresh, port: u16) -> TcpListener {
    fresh.run(move || {
        let listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
        if [15001, 15006, 15008].contains(&port) {
            mark_as_ztunnel(&listener);
        }
        listener
    })
}

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// The mark is omitted if 0.
fn dial(fresh: &Fresh, from: Option<&str>, mark: u32, to: SocketAddr) -> Option<TcpStream> {
    let from: Option<IpAddr> = from.map(|from| from.parse().unwrap());
    fresh.run(move || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP));
        let socket = socket.unwrap();
        socket.set_mark(mark).unwrap();
        if let Some(from) = from {
            socket.set_ip_transparent_v4(true).unwrap();
            socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
        }
        socket.connect_timeout(&to.into(), TIMEOUT).ok()?;
        Some(socket.into())
    })
}

fn arrives(at: &TcpListener, stream: &TcpStream) -> bool {
    at.set_nonblocking(true).unwrap();
    let port = stream.local_addr().unwrap().port();
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        match at.accept() {
            Ok((_, peer)) if peer.port() == port => return true,
            Ok(_) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    false
}

#[test]
fn a_clean_pod_has_none_before_and_after_our_rules() {
    let fresh = Fresh::new();
    is_clean(&fresh);
    let (pod, _server) = pod();
    is_clean(&pod);
}
