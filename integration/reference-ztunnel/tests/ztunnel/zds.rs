//! Tests of the behavior that was observed on stock ztunnel.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::agent::{ACK, Agent, add, encode};
use crate::network::{DEADLINE, Netns, eventually};
use crate::ztunnel::Ztunnel;

const LISTENERS: [u16; 3] = [15001, 15006, 15008];

fn pod(uid: &str, state: &str) -> (String, String) {
    (uid.to_owned(), state.to_owned())
}

#[test]
fn the_hello_comes_first_and_at_once() {
    let (_ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept_silent();
    assert_eq!(connection.receive(), [0x08, 0x01]);
}

#[test]
fn an_added_pod_gets_its_listeners_and_a_deleted_one_loses_them() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = (Netns::new(), Netns::new());
    assert_eq!(connection.add("a", &a), ACK);
    assert_eq!(a.listening(), LISTENERS);
    assert!(b.listening().is_empty());
    assert!(!ztunnel.ready(), "before the snapshot");
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(ztunnel.ready());
    assert_eq!(ztunnel.pods(), [pod("a", "running")]);

    assert_eq!(connection.del("a"), ACK);
    assert!(a.listening().is_empty());
    assert!(ztunnel.pods().is_empty());
    assert_eq!(connection.del("never seen"), ACK);
}

#[test]
fn a_deleted_pod_is_let_go_of() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    connection.snapshot_sent();
    let before = threads_and_descriptors(&ztunnel);
    let pod = Netns::new();
    assert_eq!(connection.add("a", &pod), ACK);
    assert_ne!(threads_and_descriptors(&ztunnel), before);
    assert_eq!(connection.del("a"), ACK);
    eventually("no thread and no descriptor of the pod", || {
        (threads_and_descriptors(&ztunnel) == before).then_some(())
    });
}

fn threads_and_descriptors(ztunnel: &Ztunnel) -> (usize, usize) {
    let count = |name| {
        let path = format!("/proc/{}/{name}", ztunnel.process.id());
        fs::read_dir(path).expect("/proc").count()
    };
    (count("task"), count("fd"))
}

#[test]
fn only_a_pods_own_thread_is_in_its_netns() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    assert_eq!(connection.add("a", &Netns::new()), ACK);
    let tasks = format!("/proc/{}/task", ztunnel.process.id());
    let main = fs::read_link(format!("/proc/{}/ns/net", ztunnel.process.id())).expect("/proc");
    let mut names = Vec::new();
    for task in fs::read_dir(tasks).expect("/proc").flatten() {
        if fs::read_link(task.path().join("ns/net")).expect("/proc") != main {
            names.push(fs::read_to_string(task.path().join("comm")).expect("/proc"));
        }
    }
    assert_eq!(names, ["netns\n"]);
}

#[test]
fn adding_a_pod_again_restarts_nothing_and_another_netns_replaces_it() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (first, second) = (Netns::new(), Netns::new());
    assert_eq!(connection.add("a", &first), ACK);
    let mut live = live_connection(&first);
    assert_eq!(connection.add("a", &first), ACK);
    assert_echoes(&mut live);
    // A process of another test holds the listener of the connection from its fork to its exec.
    let deadline = Instant::now() + Duration::from_secs(20);
    while first.listening() != LISTENERS {
        assert!(Instant::now() < deadline, "{:?}", first.listening());
        std::thread::yield_now();
    }

    assert_eq!(connection.add("a", &second), ACK);
    assert_eq!(second.listening(), LISTENERS);
    first.awaits_listening(&[]);
    assert_ends(&mut live);
    assert_eq!(ztunnel.pods(), [pod("a", "running")]);
}

#[test]
fn a_netns_with_ipv6_switched_off_is_served_over_ipv4() {
    let (_ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let netns = Netns::new();
    let setting = "/proc/sys/net/ipv6/conf/all/disable_ipv6";
    netns.within(|| fs::write(setting, "1")).expect("sysctl");
    assert_eq!(connection.add("a", &netns), ACK);
    live_connection(&netns);
}

#[test]
fn two_pods_in_one_netns_both_listen() {
    let (_ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let netns = Netns::new();
    assert_eq!(connection.add("a", &netns), ACK);
    assert_eq!(connection.add("b", &netns), ACK);
    assert_eq!(
        netns.listening(),
        [15001, 15001, 15006, 15006, 15008, 15008]
    );
}

#[test]
fn a_descriptor_that_is_no_netns_leaves_the_pod_pending_and_the_connection_open() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    for path in ["/dev/null", "/proc/self/ns/mnt"] {
        let error = connection.add_file("a", &File::open(path).expect("open"));
        assert!(error.starts_with("failure to start proxy : "), "{error}");
        assert!(error.contains("code: 22"), "{error}");
    }
    assert_eq!(connection.snapshot_sent(), ACK);
    assert_eq!(ztunnel.pods(), [pod("a", "pending")]);
    assert!(!ztunnel.ready());

    assert_eq!(connection.add("a", &Netns::new()), ACK);
    assert_eq!(ztunnel.pods(), [pod("a", "running")]);
    assert!(ztunnel.ready());
}

#[test]
fn a_pod_whose_port_is_taken_is_pending_until_the_port_is_free() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let netns = Netns::new();
    let any = (Ipv6Addr::UNSPECIFIED, 15008);
    let taken = netns.within(|| TcpListener::bind(any)).expect("bind");
    let error = connection.add("a", &netns);
    let expected = "failure to start proxy : Bind([::]:15008, Os { code: 98, kind: AddrInUse,";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(connection.snapshot_sent(), ACK);
    assert_eq!(netns.listening(), [15008], "all listeners or none");
    assert!(!ztunnel.ready());

    drop(taken);
    eventually("the retry", || ztunnel.ready().then_some(()));
    assert_eq!(netns.listening(), LISTENERS);
    assert_eq!(ztunnel.pods(), [pod("a", "running")]);
}

#[test]
fn pending_pods_are_forgotten_at_a_reconnect() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    connection.add_file("a", &File::open("/dev/null").expect("open"));
    assert_eq!(ztunnel.pods(), [pod("a", "pending")]);
    drop(connection);
    let mut connection = agent.accept();
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(ztunnel.pods().is_empty());
    assert!(ztunnel.ready());
}

#[test]
fn wrong_descriptors_are_answered_and_end_the_connection_but_not_the_process() {
    let (mut ztunnel, agent) = Ztunnel::start(&[]);
    let netns = Netns::new();
    let mut connection = agent.accept();
    assert_eq!(connection.add("a", &netns), ACK);
    assert_eq!(connection.snapshot_sent(), ACK);
    let file = &netns.0;
    let cases: [(&[&File], &str); 3] = [
        (&[], "failure to read message : No control message"),
        (
            &[file, file],
            "failure to read message : Expected 1 FD, got 2",
        ),
        (&[file, file, file], "failure to read message : ENOBUFS"),
    ];
    for (descriptors, expected) in cases {
        connection.send(&encode(add("b")), descriptors);
        let error = connection.ack();
        assert!(error.starts_with(expected), "{error}");
        assert!(connection.receive().is_empty(), "the end");
        connection = agent.accept();
    }
    assert!(ztunnel.runs());
    assert_eq!(netns.listening(), LISTENERS, "what runs is untouched");
}

#[test]
fn protocol_errors_are_answered_and_end_the_process_with_1() {
    let add_without_info = b"\x0a\x03\x0a\x01a";
    let keep = b"\x2a\x03\x0a\x01a";
    let snapshot_sent = b"\x1a\x00";
    for violation in [&add_without_info[..], keep, snapshot_sent] {
        let (mut ztunnel, agent) = Ztunnel::start(&[]);
        let mut connection = agent.accept();
        let netns = Netns::new();
        assert_eq!(connection.add("a", &netns), ACK);
        assert_eq!(connection.snapshot_sent(), ACK);
        let descriptors = [&netns.0];
        let descriptors = &descriptors[..usize::from(violation == add_without_info)];
        connection.send(violation, descriptors);
        let error = connection.ack();
        let expected = "failure to process message : ProtocolError(\"";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(ztunnel.awaits_exit().code(), Some(1));
        assert!(netns.listening().is_empty());
    }
}

#[test]
fn the_end_of_a_connection_is_followed_by_the_next_hello_at_once() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let start = Instant::now();
    for _ in 0..200 {
        drop(agent.accept());
    }
    // Even with the shortest backoff, the reconnections would take minutes.
    assert!(start.elapsed() < Duration::from_secs(20));
    drop(ztunnel);
}

#[test]
fn an_agent_that_starts_late_is_found() {
    let directory = tempfile::tempdir().expect("tempdir");
    let path = directory.path().join("zds.sock");
    let ztunnel = Ztunnel::spawn(directory, &[]);
    eventually("the first state", || {
        ztunnel.path("state.json").exists().then_some(())
    });
    assert!(!ztunnel.ready());
    Agent::listen(&path).accept();
}

#[test]
fn running_pods_survive_a_reconnect_and_the_snapshot_decides_which_stay() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (kept, left_out) = (Netns::new(), Netns::new());
    assert_eq!(connection.add("kept", &kept), ACK);
    assert_eq!(connection.add("left out", &left_out), ACK);
    assert_eq!(connection.snapshot_sent(), ACK);
    let mut live = live_connection(&kept);
    drop(connection);

    let mut connection = agent.accept();
    assert!(!ztunnel.ready());
    assert_eq!(connection.keep("kept"), ACK);
    assert_eq!(connection.del("left out"), ACK);
    assert_eq!(left_out.listening(), LISTENERS, "not before the snapshot");
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(left_out.listening().is_empty());
    assert!(ztunnel.ready());
    assert_eq!(kept.listening(), LISTENERS);
    assert_echoes(&mut live);
}

#[test]
fn not_ready_without_a_connection() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(ztunnel.ready());
    drop(agent);
    drop(connection);
    eventually("not ready", || (!ztunnel.ready()).then_some(()));
    assert_eq!(ztunnel.state()["connected"], false);
}

#[test]
fn a_del_cuts_connections_and_the_log_says_so() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let netns = Netns::new();
    connection.add("a", &netns);
    connection.snapshot_sent();
    let mut live = live_connection(&netns);
    assert_eq!(connection.del("a"), ACK);
    assert_ends(&mut live);
    let line = ztunnel.awaits_line(|line| line["event"] == "closed");
    assert_eq!(line["error"], "cut by ztunnel");
    assert_eq!(line["bytes_from_source"], 5);
    assert_eq!(line["bytes_from_destination"], 5);
}

#[test]
fn sigterm_closes_listeners_and_leaves_live_connections_their_time() {
    let (mut ztunnel, agent) = Ztunnel::start(&["--termination-deadline-seconds", "1"]);
    let mut connection = agent.accept();
    let netns = Netns::new();
    connection.add("a", &netns);
    connection.snapshot_sent();
    let mut live = live_connection(&netns);

    let start = Instant::now();
    ztunnel.terminate();
    assert!(connection.receive().is_empty(), "the end of the session");
    // The application of the live connection listened, too, and is gone.
    netns.awaits_listening(&[]);
    assert_echoes(&mut live);
    assert_ends(&mut live);
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(ztunnel.awaits_exit().code(), Some(0));
}

#[test]
fn sigterm_without_connections_ends_at_once() {
    let (mut ztunnel, agent) = Ztunnel::start(&["--termination-deadline-seconds", "60"]);
    let mut connection = agent.accept();
    connection.add("a", &Netns::new());
    ztunnel.terminate();
    assert_eq!(ztunnel.awaits_exit().code(), Some(0));
}

/// Opens a connection through the HBONE stand-in to an application that echoes.
fn live_connection(netns: &Netns) -> TcpStream {
    let application = netns
        .within(|| TcpListener::bind("127.0.0.1:0"))
        .expect("bind");
    let target = application.local_addr().expect("address");
    let mut stream = netns
        .within(|| TcpStream::connect("127.0.0.1:15008"))
        .expect("connect");
    stream.set_read_timeout(Some(DEADLINE)).expect("timeout");
    write!(stream, "CONNECT {target} HTTP/1.1\r\n\r\n").expect("write");
    application.set_nonblocking(true).expect("nonblocking");
    let (mut server, _) = eventually("the application", || application.accept().ok());
    std::thread::spawn(move || {
        let mut other = server.try_clone().expect("clone");
        // The copy ends with the connection.
        drop(std::io::copy(&mut server, &mut other));
    });
    let mut answer = [0; 19];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 200 OK\r\n\r\n");
    assert_echoes(&mut stream);
    stream
}

fn assert_echoes(stream: &mut TcpStream) {
    stream.write_all(b"hello").expect("write");
    let mut echo = [0; 5];
    stream.read_exact(&mut echo).expect("an echo");
    assert_eq!(&echo, b"hello");
}

fn assert_ends(stream: &mut TcpStream) {
    let mut rest = [0; 1];
    let ended = match stream.read(&mut rest) {
        Ok(length) => length == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(ended, "the connection goes on");
}
