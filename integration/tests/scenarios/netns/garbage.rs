//! Input that is no call: the service serves others and keeps nothing of it.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use integration::{Node, Pod, SERVICES, Spec, State, run};

/// The preface of HTTP/2 (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Returns gRPC's sockets, and the one that passes descriptors.
fn sockets(node: &Node) -> Vec<PathBuf> {
    let grpc = SERVICES.map(|service| inpod_service::socket(&node.run_dir(), service));
    grpc.into_iter()
        .chain([node.run_dir().join("netns/netns.sock")])
        .collect()
}

/// Returns bytes that are the same in every run (xorshift).
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).collect()
}

fn nonsense() -> Vec<Vec<u8>> {
    let frame = |kind: u8, length: u8| {
        let mut bytes = PREFACE.to_vec();
        bytes.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
        bytes.extend([0, 0, length, kind, 0, 0, 0, 0, 1]);
        bytes
    };
    let mut found = vec![
        Vec::new(),
        vec![0],
        b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        b"POST /inpod.podevents.v1.PodEventsService/GetStatus HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0".to_vec(),
        PREFACE.to_vec(),
        [PREFACE, &[0xff; 64]].concat(),
        noise(100),
        noise(1 << 20),
        [PREFACE, &noise(1 << 16)].concat(),
        // netns.sock's longest frame, and one beyond, empty.
        4096_u32.to_be_bytes().to_vec(),
        u32::MAX.to_be_bytes().to_vec(),
        [&100_u32.to_be_bytes()[..], &noise(100)].concat(),
    ];
    // Frames of a stream that was never opened, complete and truncated.
    found.extend((0..=10).map(|kind| frame(kind, 4)));
    found.extend((0..=10).map(|kind| [frame(kind, 4), noise(4)].concat()));
    found
}

fn serves_others(node: &Node, pod: &Pod) {
    node.add(pod).unwrap();
    node.until_whole(&pod.spec).unwrap();
    let outcome = node.call(integration::Call::del, pod).run().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
}

/// Raises the limit of open files of this process, and so of the processes that it starts, to what it may have.
pub(crate) fn raise_open_files() {
    let script = "prlimit --pid $0 --nofile=$(prlimit --pid $0 --nofile -o HARD --noheadings)";
    run("sh", &["-ec", script, &std::process::id().to_string()]).unwrap();
}

#[test]
fn bytes_that_are_no_call_end_their_connection_and_nothing_else() {
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    serves_others(&node, &pod);
    let before = State::of(&node, &[&pod]).unwrap();
    for socket in sockets(&node) {
        for bytes in nonsense() {
            let mut stream = UnixStream::connect(&socket).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            // The service may leave it unread and unanswered.
            stream.write_all(&bytes).unwrap_or_default();
            let mut answer = [0; 4096];
            stream.read(&mut answer).unwrap_or_default();
        }
    }
    serves_others(&node, &pod);
    before.unchanged(&node, &[&pod]).unwrap();
}

#[test]
fn a_thousand_connections_that_say_nothing_or_stop_half_way_keep_nobody_from_being_served() {
    raise_open_files();
    let node = Node::running().unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    serves_others(&node, &pod);
    let before = State::of(&node, &[&pod]).unwrap();
    let mut open = Vec::new();
    for number in 0..1000 {
        for socket in sockets(&node) {
            let mut stream = UnixStream::connect(&socket).unwrap();
            let begun = match number % 4 {
                0 => &b""[..],
                1 => PREFACE.get(..12).unwrap(),
                2 => PREFACE,
                _ => &[0, 0],
            };
            stream.write_all(begun).unwrap();
            open.push(stream);
        }
    }
    serves_others(&node, &pod);
    drop(open);
    serves_others(&node, &pod);
    before.unchanged(&node, &[&pod]).unwrap();
}

#[test]
fn a_connection_that_stays_open_keeps_no_service_from_ending() {
    let node = Node::running().unwrap();
    let open: Vec<_> = sockets(&node)
        .iter()
        .map(|socket| {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.write_all(PREFACE).unwrap();
            stream
        })
        .collect();
    for service in SERVICES {
        node.stop(service, nix::sys::signal::Signal::SIGTERM)
            .unwrap();
    }
    drop(open);
}
