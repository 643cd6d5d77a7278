//! Tests of traffic between two network namespaces, of which one or both are redirected like ambient pods.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::agent::{ACK, Connection};
use crate::network::{DEADLINE, Netns};
use crate::ztunnel::Ztunnel;

/// The relevant part of the redirection: all traffic goes to the listeners except ztunnel's own packets, whose answers
/// return to ztunnel.
const RULES: &str = "
table inet redirection {
  chain nat_prerouting {
    type nat hook prerouting priority dstnat
    tcp dport != 15008 meta mark & 0xfff != 0x539 redirect to :15006
  }
  chain nat_output {
    type nat hook output priority -100
    meta mark & 0xfff == { 0x111, 0x539 } accept
    oifname lo accept
    meta l4proto tcp redirect to :15001
  }
  chain mangle_prerouting {
    type filter hook prerouting priority mangle
    meta mark & 0xfff == 0x539 ct mark set 0x111
  }
  chain mangle_output {
    type route hook output priority mangle
    ct mark & 0xfff == 0x111 meta mark set ct mark
  }
}
";

pub(crate) const A: [&str; 2] = ["10.7.0.1", "fd07::1"];
pub(crate) const B: [&str; 2] = ["10.7.0.2", "fd07::2"];

pub(crate) fn pods() -> (Netns, Netns) {
    let (a, b) = (Netns::new(), Netns::new());
    a.ip(&format!(
        "link add eth0 type veth peer name eth0 netns {}",
        b.path()
    ));
    for (pod, [v4, v6]) in [(&a, A), (&b, B)] {
        pod.ip(&format!("addr add {v4}/24 dev eth0"));
        pod.ip(&format!("addr add {v6}/64 dev eth0 nodad"));
        pod.ip("link set eth0 up");
    }
    (a, b)
}

pub(crate) fn enroll(connection: &mut Connection, uid: &str, pod: &Netns) {
    assert_eq!(connection.add(uid, pod), ACK);
    for family in ["-4", "-6"] {
        pod.ip(&format!(
            "{family} route add local default dev lo table 100"
        ));
        pod.ip(&format!(
            "{family} rule add fwmark 0x111/0xfff lookup 100 pref 32764"
        ));
    }
    pod.nft(RULES);
}

/// Starts an application that replies with the client's address until the test ends.
pub(crate) fn application(pod: &Netns, port: u16) {
    let any = (std::net::Ipv6Addr::UNSPECIFIED, port);
    let listener = pod.within(|| TcpListener::bind(any)).expect("bind");
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let peer = client.peer_addr().expect("a peer").ip().to_canonical();
            write!(client, "{peer}").expect("write");
        }
    });
}

pub(crate) fn connect(from: &Netns, to: SocketAddr) -> TcpStream {
    let connect = || TcpStream::connect_timeout(&to, DEADLINE);
    let stream = from.within(connect).expect("connect");
    stream.set_read_timeout(Some(DEADLINE)).expect("timeout");
    stream
}

pub(crate) fn read_all(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

pub(crate) fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), port)
}

#[test]
fn a_client_outside_the_mesh_reaches_the_application_through_15006_with_its_address() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    application(&b, 8080);
    enroll(&mut connection, "b", &b);
    for (client, server) in A.into_iter().zip(B) {
        let server = address(server, 8080);
        assert_eq!(read_all(connect(&a, server)), client);
        let line = ztunnel.awaits_line(|line| {
            line["event"] == "closed" && line["original_destination"] == server.to_string()
        });
        assert_eq!(line["listener"], 15006);
        assert_eq!(line["uid"], "b");
        assert_eq!(ip_of(&line["source"]), client);
        assert_eq!(ip_of(&line["upstream_source"]), client);
        assert_eq!(line["bytes_from_destination"], client.len());
        assert!(line["error"].is_null(), "{line}");
    }
}

fn ip_of(address: &serde_json::Value) -> String {
    let address: SocketAddr = address.as_str().expect("text").parse().expect("address");
    address.ip().to_string()
}

#[test]
fn between_two_pods_of_the_mesh_15001_comes_before_15006() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    application(&b, 8080);
    enroll(&mut connection, "a", &a);
    enroll(&mut connection, "b", &b);
    for (client, server) in A.into_iter().zip(B) {
        let server = address(server, 8080);
        assert_eq!(read_all(connect(&a, server)), client);
        for (uid, listener) in [("a", 15001), ("b", 15006)] {
            let line = ztunnel.awaits_line(|line| {
                line["event"] == "closed"
                    && line["uid"] == uid
                    && line["original_destination"] == server.to_string()
            });
            assert_eq!(line["listener"], listener);
            assert!(line["error"].is_null(), "{line}");
        }
    }
}

#[test]
fn a_live_connection_is_in_the_log_already() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    let any = (std::net::Ipv6Addr::UNSPECIFIED, 8080);
    let _quiet = b.within(|| TcpListener::bind(any)).expect("bind");
    enroll(&mut connection, "b", &b);
    let _live = connect(&a, address(B[0], 8080));
    let line = ztunnel.awaits_line(|line| line["event"] == "accepted");
    assert_eq!(line["listener"], 15006);
    assert_eq!(line["original_destination"], "10.7.0.2:8080");
}

#[test]
fn the_hbone_stand_in_keeps_the_clients_address() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    application(&b, 8080);
    enroll(&mut connection, "b", &b);
    let mut stream = connect(&a, address(B[0], 15008));
    write!(stream, "CONNECT 10.7.0.2:8080 HTTP/1.1\r\n\r\n").expect("write");
    assert_eq!(read_all(stream), "HTTP/1.1 200 OK\r\n\r\n10.7.0.1");
    let line = ztunnel.awaits_line(|line| line["event"] == "closed");
    assert_eq!(line["listener"], 15008);
    assert_eq!(line["original_destination"], "10.7.0.2:8080");
}

#[test]
fn the_hbone_stand_in_is_no_relay() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    enroll(&mut connection, "b", &b);
    for target in ["10.7.0.1:8080", "10.7.0.2:15006"] {
        let mut stream = connect(&a, address(B[0], 15008));
        write!(stream, "CONNECT {target} HTTP/1.1\r\n\r\n").expect("write");
        assert!(read_all(stream).starts_with("HTTP/1.1 400 "));
        let line = ztunnel.awaits_line(|line| {
            line["event"] == "closed" && line["original_destination"] == target
        });
        let error = line["error"].as_str().expect("an error");
        assert!(error.starts_with("refused: "), "{error}");
    }
}

#[test]
fn a_connection_to_a_listener_itself_is_refused_and_logged() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    // Without rules no connection is redirected, so the connections are made to the listeners themselves.
    assert_eq!(connection.add("b", &b), ACK);
    for port in [15001, 15006] {
        assert_eq!(read_all(connect(&a, address(B[0], port))), "");
        let line =
            ztunnel.awaits_line(|line| line["event"] == "closed" && line["listener"] == port);
        let error = line["error"].as_str().expect("an error");
        assert!(error.starts_with("refused: "), "{error}");
    }
}

#[test]
fn an_application_that_does_not_listen_is_an_error_in_the_log() {
    let (ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    enroll(&mut connection, "b", &b);
    assert_eq!(read_all(connect(&a, address(B[0], 8080))), "");
    let line = ztunnel.awaits_line(|line| line["event"] == "closed");
    let error = line["error"].as_str().expect("an error");
    assert!(error.contains("Connection refused"), "{error}");
}

#[test]
fn half_a_connection_may_end_before_the_other() {
    let (_ztunnel, agent) = Ztunnel::start(&[]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    let any = (std::net::Ipv6Addr::UNSPECIFIED, 8080);
    let listener = b.within(|| TcpListener::bind(any)).expect("bind");
    enroll(&mut connection, "b", &b);
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        let timeout = stream.set_read_timeout(Some(Duration::from_secs(10)));
        timeout.expect("timeout");
        let mut request = Vec::new();
        stream.read_to_end(&mut request).expect("the request");
        stream.write_all(&request).expect("write");
    });
    let mut stream = connect(&a, address(B[0], 8080));
    let request = vec![b'x'; 1_000_000];
    stream.write_all(&request).expect("write");
    stream
        .shutdown(std::net::Shutdown::Write)
        .expect("shutdown");
    assert_eq!(read_all(stream).len(), request.len());
    server.join().expect("the server");
}
