//! While rules of one kind replace another, captured connections continue and new ones are captured: none is
//! refused or bypasses ztunnel.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use netconfig::{
    apply::Phase,
    rules::{Ambient, Redirection},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::istio::Form;
use crate::support::{Fresh, ambient, plain, sandbox};

const TIMEOUT: Duration = Duration::from_secs(20);

/// The pod's and its peer's, per family.
const ADDRESSES: [(&str, &str); 2] = [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")];

/// Only the outside listens on it.
const PORT: u16 = 8080;

/// A pod, and its peer.
struct Node {
    pod: Fresh,
    peer: Fresh,
    /// ztunnel's listeners for outbound and inbound traffic.
    outbound: TcpListener,
    inbound: TcpListener,
    /// Accepts traffic that bypasses ztunnel.
    outside: TcpListener,
}

impl Node {
    fn new() -> Self {
        let (pod, peer) = (Fresh::new(), Fresh::new());
        let path = peer.netns.path().to_str().unwrap().to_owned();
        let task = path.split('/').nth(4).unwrap();
        pod.ip(&format!(
            "link add eth0 type veth peer name eth0 netns {task}"
        ));
        for (fresh, addresses) in [
            (&pod, ADDRESSES.map(|(pod, _)| pod)),
            (&peer, ADDRESSES.map(|(_, peer)| peer)),
        ] {
            fresh.ip(&format!("addr add {}/24 dev eth0", addresses[0]));
            fresh.ip(&format!("addr add {}/64 dev eth0 nodad", addresses[1]));
            fresh.ip("link set eth0 up");
        }
        let [outbound, inbound] = [15001, 15006].map(|port| listen(&pod.netns, port));
        let outside = listen(&peer.netns, PORT);
        Self {
            pod,
            peer,
            outbound,
            inbound,
            outside,
        }
    }

    /// Opens connections in both directions and families.
    fn connections(&self) -> Vec<(TcpStream, TcpStream)> {
        let mut connections = Vec::new();
        for (pod, peer) in ADDRESSES {
            let out = dial(&self.pod.netns, peer).unwrap();
            let taken = accept(&self.outbound, &out);
            connections.push((out, taken));
            let into = dial(&self.peer.netns, pod).unwrap();
            let taken = accept(&self.inbound, &into);
            connections.push((into, taken));
        }
        connections
    }
}

/// Accepts foreign destinations, like ztunnel.
fn listen(netns: &Netns, port: u16) -> TcpListener {
    let socket = netns.within(|| Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)));
    let socket = socket.unwrap().unwrap();
    socket.set_ip_transparent_v4(true).unwrap();
    socket.set_reuse_address(true).unwrap();
    let any: SocketAddr = (IpAddr::from([0; 16]), port).into();
    socket.bind(&any.into()).unwrap();
    socket.listen(1024).unwrap();
    socket.into()
}

fn dial(netns: &Netns, to: &str) -> io::Result<TcpStream> {
    let to = SocketAddr::new(to.parse().unwrap(), PORT);
    let domain = Domain::for_address(to);
    let socket = netns.within(|| Socket::new(domain, Type::STREAM, Some(Protocol::TCP)));
    let socket = socket.unwrap()?;
    socket.connect_timeout(&to.into(), TIMEOUT)?;
    Ok(socket.into())
}

/// A connection that bypasses ztunnel never arrives: fails after a timeout. Other connections may be in the queue.
fn accept(listener: &TcpListener, dialled: &TcpStream) -> TcpStream {
    let port = dialled.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, peer)) if peer.port() == port => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Ok(_) => continue,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                assert!(Instant::now() < deadline, "a connection was not captured");
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn talk(connections: &mut [(TcpStream, TcpStream)], when: &str) {
    for (a, b) in connections {
        for (mut from, to) in [(&*a, &*b), (&*b, &*a)] {
            to.set_read_timeout(Some(TIMEOUT)).unwrap();
            from.write_all(b"hello\n").unwrap();
            let mut line = String::new();
            let read = BufReader::new(to).read_line(&mut line);
            assert!(read.is_ok() && line == "hello\n", "{when}: {read:?}");
        }
    }
}

#[derive(Default)]
struct Counts {
    captured: AtomicUsize,
    escaped: AtomicUsize,
    failed: Mutex<Vec<String>>,
}

/// Opens connections in both directions and families, one after another, while `work` runs.
fn under_load(node: &Node, work: impl FnOnce()) -> Counts {
    let (counts, is_over) = (Counts::default(), AtomicBool::new(false));
    let until_over = |step: &dyn Fn()| {
        while !is_over.load(Ordering::Relaxed) {
            step();
        }
    };
    let take = |listener: &TcpListener, count: &AtomicUsize| {
        listener.set_nonblocking(true).unwrap();
        if listener.accept().is_ok() {
            count.fetch_add(1, Ordering::Relaxed);
        } else {
            thread::sleep(Duration::from_micros(200));
        }
    };
    let open = |netns: &Netns, to: &str| {
        if let Err(error) = dial(netns, to) {
            counts.failed.lock().unwrap().push(format!("{to}: {error}"));
        }
        // Limits the rate: ports must not run out.
        thread::sleep(Duration::from_millis(1));
    };
    thread::scope(|scope| {
        for listener in [&node.outbound, &node.inbound] {
            scope.spawn(|| until_over(&|| take(listener, &counts.captured)));
        }
        scope.spawn(|| until_over(&|| take(&node.outside, &counts.escaped)));
        for (pod, peer) in ADDRESSES {
            scope.spawn(move || until_over(&|| open(&node.pod.netns, peer)));
            scope.spawn(move || until_over(&|| open(&node.peer.netns, pod)));
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    counts
}

fn nothing_was_lost(counts: &Counts) {
    let failed = counts.failed.lock().unwrap();
    assert_eq!(*failed, [""; 0]);
    assert_eq!(counts.escaped.load(Ordering::Relaxed), 0);
    assert!(
        counts.captured.load(Ordering::Relaxed) > 20,
        "too little was tried"
    );
}

fn with_names() -> Redirection {
    Redirection::Ambient(Ambient {
        dns_capture: true,
        ..Ambient::default()
    })
}

#[test]
fn nothing_is_lost_while_capture_moves_between_tables() {
    let node = Node::new();
    let apply = |redirection: &Redirection| {
        let applied = plain().apply(&node.pod.netns, redirection, &sandbox("c1"));
        assert!(applied.unwrap().changed);
    };
    apply(&ambient());
    let mut held = node.connections();
    let counts = under_load(&node, || {
        for _ in 0..6 {
            apply(&with_names());
            apply(&ambient());
        }
    });
    nothing_was_lost(&counts);
    talk(&mut held, "after it");
    let mut new = node.connections();
    talk(&mut new, "new ones");
}

#[test]
fn nothing_is_lost_while_the_incumbents_rules_are_taken_over() {
    for form in Form::ALL {
        let node = Node::new();
        crate::istio::leave(form, &node.pod);
        let mut held = node.connections();
        let counts = under_load(&node, || {
            // Some connections precede the change.
            thread::sleep(Duration::from_millis(50));
            let applied = plain().apply(&node.pod.netns, &ambient(), &sandbox("c1"));
            assert!(applied.unwrap().changed);
            thread::sleep(Duration::from_millis(50));
        });
        nothing_was_lost(&counts);
        talk(&mut held, &format!("{form:?}"));
    }
}

#[test]
fn captured_connections_survive_a_drain_and_are_counted_and_new_ones_go_direct() {
    let node = Node::new();
    let writer = plain();
    let applied = writer.apply(&node.pod.netns, &ambient(), &sandbox("c1"));
    applied.unwrap();
    let mut held = node.connections();
    let drain = || {
        let removed = writer.remove(&node.pod.netns, &sandbox("c1"), Phase::Drain);
        removed.unwrap().captured_flows
    };
    assert_eq!(drain(), 4);
    talk(&mut held, "drained");
    let mut direct = Vec::new();
    for (_, peer) in ADDRESSES {
        let out = dial(&node.pod.netns, peer).unwrap();
        let taken = accept(&node.outside, &out);
        direct.push((out, taken));
    }
    talk(&mut direct, "direct");
    talk(&mut held, "beside direct ones");
    assert_eq!(drain(), 4);
    drop(held);
    // A process of another test holds all sockets from its fork to its exec.
    let deadline = Instant::now() + TIMEOUT;
    while drain() > 0 {
        assert!(Instant::now() < deadline, "none is held any more");
        thread::yield_now();
    }
}
