//! Tests the client against an agent that is played packet by packet.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test stops at what it did not expect, in its helpers too"
)]

use std::fs::File;
use std::future::Future;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use tokio_seqpacket::ancillary::AncillaryMessageWriter;
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};
use zds_client::{AckError, Client, ConnectError, Options, Received, RecvError};

const ADD: &[u8] = b"\x0a\x25\x0a\x05uid-1\x12\x1c\x0a\x06client\x12\x07default\x1a\x09sa-client";
const DEL: &[u8] = b"\x12\x07\x12\x05uid-1";
const SNAPSHOT_SENT: &[u8] = b"\x1a\x00";
const KEEP: &[u8] = b"\x2a\x07\x0a\x05uid-1";

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .expect("deadline")
}

struct Agent(UnixSeqpacket);

impl Agent {
    async fn receives(&self) -> Vec<u8> {
        let mut buffer = [0; 2048];
        let message = within(self.0.recv(&mut buffer)).await.expect("recv");
        buffer[..message.bytes_read()].to_vec()
    }

    async fn sends(&self, packet: &[u8]) {
        within(self.0.send(packet)).await.expect("send");
    }

    async fn sends_with_descriptors(&self, packet: &[u8], count: usize) {
        let file = File::open("/dev/null").expect("/dev/null");
        let mut buffer = [0; 256];
        let mut ancillary = AncillaryMessageWriter::new(&mut buffer);
        ancillary
            .add_fds(std::iter::repeat_n(file.as_fd(), count))
            .expect("room");
        let packet = [IoSlice::new(packet)];
        within(self.0.send_vectored_with_ancillary(&packet, &mut ancillary))
            .await
            .expect("send");
    }
}

/// Returns a client and an agent, connected and after the hello.
async fn connection(options: Options) -> (Client, Agent) {
    let directory = tempfile::tempdir().expect("tempdir");
    let path = directory.path().join("zds.sock");
    let mut listener = UnixSeqpacketListener::bind(&path).expect("bind");
    let client = within(options.connect(&path)).await.expect("connect");
    let agent = Agent(within(listener.accept()).await.expect("accept"));
    assert_eq!(agent.receives().await, b"\x08\x01");
    (client, agent)
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

#[tokio::test]
async fn requests_are_received_in_order_and_answered_by_position() {
    let (mut client, agent) = connection(Options::default()).await;
    agent.sends_with_descriptors(ADD, 1).await;
    agent.sends(KEEP).await;
    agent.sends(SNAPSHOT_SENT).await;
    agent.sends(DEL).await;

    let mut names = Vec::new();
    for _ in 0..4 {
        let received = within(client.recv()).await.expect("recv").expect("request");
        names.push(format!("{received:?}"));
    }
    client.ack(Ok(())).await.expect("ack");
    client.ack(Err("no such pod")).await.expect("ack");

    assert!(names[0].starts_with("Add"), "{names:?}");
    assert!(names[1].starts_with("Keep"), "{names:?}");
    assert!(names[2].starts_with("SnapshotSent"), "{names:?}");
    assert!(names[3].starts_with("Del"), "{names:?}");
    assert_eq!(agent.receives().await, b"\x0a\x00");
    assert_eq!(agent.receives().await, b"\x0a\x0d\x0a\x0bno such pod");
}

#[tokio::test]
async fn an_answer_that_nobody_waits_for_is_refused() {
    let (mut client, _agent) = connection(Options::default()).await;
    assert!(matches!(
        client.ack(Ok(())).await,
        Err(AckError::NothingOwed)
    ));
}

#[tokio::test]
async fn the_end_of_the_connection_is_no_error() {
    let (mut client, agent) = connection(Options::default()).await;
    drop(agent);
    assert!(within(client.recv()).await.expect("recv").is_none());
}

#[tokio::test]
async fn an_empty_packet_is_the_end_and_leaks_no_descriptor() {
    let (mut client, agent) = connection(Options::default()).await;
    agent.sends_with_descriptors(b"", 1).await;
    assert!(within(client.recv()).await.expect("recv").is_none());
}

#[tokio::test]
async fn more_descriptors_than_fit_are_a_read_error_and_are_closed() {
    let (mut client, agent) = connection(Options::default()).await;
    let before = open_descriptors();
    for (count, text) in [(2, "Expected 1 FD, got 2"), (3, "ENOBUFS")] {
        for _ in 0..20 {
            agent.sends_with_descriptors(ADD, count).await;
            let error = within(client.recv()).await.expect_err("error").to_string();
            assert!(error.contains(text), "{error}");
        }
    }
    // Other tests of this binary open a few descriptors at the same time.
    assert!(open_descriptors() < before + 40);
}

/// Builds a Del with a size of exactly `bytes`.
fn del_of(bytes: usize) -> Vec<u8> {
    let uid = "u".repeat(bytes - 6);
    let mut packet = vec![0x12, 0, 0, 0x12, 0, 0];
    write_length(&mut packet[1..3], uid.len() + 3);
    write_length(&mut packet[4..6], uid.len());
    packet.extend(uid.bytes());
    packet
}

fn write_length(bytes: &mut [u8], length: usize) {
    bytes[0] = u8::try_from(length % 128).expect("seven bits") | 0x80;
    bytes[1] = u8::try_from(length / 128).expect("seven bits");
}

#[tokio::test]
async fn a_packet_of_1024_bytes_is_received_and_one_of_1025_is_a_read_error() {
    let (mut client, agent) = connection(Options::default()).await;
    agent.sends(&del_of(1024)).await;
    agent.sends(&del_of(1025)).await;
    assert!(matches!(
        within(client.recv()).await,
        Ok(Some(Received::Del { .. }))
    ));
    assert_eq!(
        within(client.recv()).await.expect_err("error").to_string(),
        "failure to read message : received truncated message"
    );
}

#[tokio::test]
async fn a_larger_receive_buffer_receives_larger_packets() {
    let (mut client, agent) = connection(Options::default().receive_buffer(4096)).await;
    agent.sends(&del_of(1025)).await;
    assert!(matches!(
        within(client.recv()).await,
        Ok(Some(Received::Del { .. }))
    ));
}

#[tokio::test]
async fn a_second_snapshot_or_a_keep_after_it_is_a_protocol_error() {
    for request in [SNAPSHOT_SENT, KEEP] {
        let (mut client, agent) = connection(Options::default()).await;
        agent.sends(SNAPSHOT_SENT).await;
        agent.sends(request).await;
        assert!(matches!(
            within(client.recv()).await,
            Ok(Some(Received::SnapshotSent))
        ));
        let error = within(client.recv()).await.expect_err("error");
        assert!(matches!(error, RecvError::Protocol(_)), "{error}");
        let text = error.to_string();
        let prefix = "failure to process message : ProtocolError(\"";
        assert!(text.starts_with(prefix), "{text}");
    }
}

#[tokio::test]
async fn a_long_error_text_is_cut_to_fit_the_agents_buffer() {
    let (mut client, agent) = connection(Options::default()).await;
    agent.sends(DEL).await;
    within(client.recv()).await.expect("recv");
    client.ack(Err(&"é".repeat(2000))).await.expect("ack");
    assert!(agent.receives().await.len() <= 1024);
}

#[tokio::test]
async fn a_socket_that_nobody_listens_on_is_a_dial_error() {
    let error = Client::connect(Path::new("/nonexistent/zds.sock")).await;
    assert!(matches!(error, Err(ConnectError::Dial(_))));
}
