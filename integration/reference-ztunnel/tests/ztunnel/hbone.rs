//! Tests of HBONE between two pods, whose link the test captures.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, socket,
};

use crate::forwarding::{A, B, address, application, connect, enroll, pods, read_all};
use crate::network::Netns;
use crate::ztunnel::Ztunnel;

const SECRET: &[u8] = b"nobody but the two pods may read this";

const END: &[u8] = b"the capture ends here";

/// A capture of the packets on the interface of a pod, which is the second interface, after `lo`.
struct Capture(OwnedFd);

impl Capture {
    fn of(pod: &Netns) -> Self {
        let all = SockProtocol::EthAll;
        let open = || socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), all);
        Self(pod.within(open).expect("a packet socket"))
    }

    /// Sends a packet with a mark, and returns whether a packet until then contained the secret, and the number of
    /// packets.
    fn ends(self, from: &Netns, to: &str) -> (bool, usize) {
        let socket = from.within(|| UdpSocket::bind("0.0.0.0:0")).expect("bind");
        socket.send_to(END, (to, 9)).expect("send");
        let (mut found, mut count) = (false, 0);
        let mut buffer = vec![0; 65536];
        loop {
            let received = recvfrom::<LinkAddr>(self.0.as_raw_fd(), &mut buffer);
            let (length, address) = received.expect("a packet");
            let packet = &buffer[..length];
            let has = |bytes: &[u8]| packet.windows(bytes.len()).any(|part| part == bytes);
            if address.expect("an address").ifindex() > 1 {
                (found, count) = (found || has(SECRET), count + 1);
                if has(END) {
                    return (found, count);
                }
            }
        }
    }
}

fn with_ca() -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().expect("tempdir");
    let path = directory.path().display().to_string();
    (directory, path)
}

/// Sends the secret as a client, and returns the answer.
fn tell(from: &Netns, to: std::net::SocketAddr) -> String {
    let mut stream = connect(from, to);
    stream.write_all(SECRET).expect("write");
    stream
        .shutdown(std::net::Shutdown::Write)
        .expect("shutdown");
    read_all(stream)
}

/// Starts an application that echoes the bytes of each client, until the test ends.
fn echo(pod: &Netns, port: u16) {
    let any = (std::net::Ipv6Addr::UNSPECIFIED, port);
    let listener = pod
        .within(|| std::net::TcpListener::bind(any))
        .expect("bind");
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut heard = Vec::new();
            client.read_to_end(&mut heard).expect("read");
            client.write_all(&heard).expect("write");
        }
    });
}

#[test]
fn between_two_pods_nobody_reads_along_and_each_knows_who_the_other_is() {
    let (_directory, ca) = with_ca();
    let (ztunnel, agent) = Ztunnel::start(&["--ca", &ca]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    for (uid, pod) in [("a", &a), ("b", &b)] {
        enroll(&mut connection, uid, pod);
        application(pod, 8080);
        echo(pod, 8081);
    }
    let capture = Capture::of(&b);
    for (client, server) in A.into_iter().zip(B) {
        // The application sees the address of the pod, not of ztunnel.
        assert_eq!(read_all(connect(&a, address(server, 8080))), client);
        let heard = tell(&a, address(server, 8081));
        assert_eq!(heard.as_bytes(), SECRET);
        for (uid, listener, peer) in [("a", 15001, "b"), ("b", 15008, "a")] {
            let line = ztunnel.awaits_line(|line| {
                line["event"] == "closed"
                    && line["uid"] == uid
                    && line["original_destination"] == address(server, 8081).to_string()
            });
            assert_eq!(line["listener"], listener, "{line}");
            let peer = format!("spiffe://cluster.local/ns/default/sa/{peer}");
            assert_eq!(line["peer_identity"], peer, "{line}");
            assert_eq!(line["bytes_from_source"], SECRET.len(), "{line}");
            assert_eq!(line["bytes_from_destination"], SECRET.len(), "{line}");
            assert!(line["error"].is_null(), "{line}");
        }
    }
    let (found, packets) = capture.ends(&a, B[0]);
    assert!(!found && packets > 20, "{packets} packets");
}

/// The negative control of the capture.
#[test]
fn what_goes_to_a_pod_outside_of_the_mesh_is_plaintext() {
    let (_directory, ca) = with_ca();
    let (ztunnel, agent) = Ztunnel::start(&["--ca", &ca]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    enroll(&mut connection, "a", &a);
    echo(&b, 8081);
    let capture = Capture::of(&b);
    assert_eq!(tell(&a, address(B[0], 8081)).as_bytes(), SECRET);
    assert!(capture.ends(&a, B[0]).0);
    let line = ztunnel.awaits_line(|line| line["event"] == "closed");
    assert!(line["peer_identity"].is_null(), "{line}");
}

#[test]
fn plaintext_on_the_hbone_port_still_reaches_the_application() {
    let (_directory, ca) = with_ca();
    let (_ztunnel, agent) = Ztunnel::start(&["--ca", &ca]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    enroll(&mut connection, "b", &b);
    application(&b, 8080);
    let mut stream = connect(&a, address(B[0], 15008));
    write!(stream, "CONNECT {}:8080 HTTP/1.1\r\n\r\n", B[0]).expect("write");
    assert!(read_all(stream).ends_with(A[0]));
}

#[test]
fn a_port_on_which_nobody_listens_is_told_through_the_tunnel() {
    let (_directory, ca) = with_ca();
    let (ztunnel, agent) = Ztunnel::start(&["--ca", &ca]);
    let mut connection = agent.accept();
    let (a, b) = pods();
    enroll(&mut connection, "a", &a);
    enroll(&mut connection, "b", &b);
    let mut stream = connect(&a, address(B[0], 9));
    assert!(stream.read(&mut [0]).unwrap_or(0) == 0, "nobody answers");
    let line = ztunnel.awaits_line(|line| line["event"] == "closed" && line["uid"] == "a");
    let error = line["error"].as_str().expect("an error");
    assert!(error.contains("the peer answered 400"), "{line}");
}
