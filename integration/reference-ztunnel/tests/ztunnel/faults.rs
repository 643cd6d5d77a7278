//! Tests of the faults, as an agent observes them.

use std::time::{Duration, Instant};

use crate::agent::{ACK, add, encode};
use crate::network::Netns;
use crate::ztunnel::Ztunnel;

const A_WHILE: Duration = Duration::from_millis(300);

#[test]
fn never_ack_reads_and_neither_answers_nor_opens_listeners() {
    let (_ztunnel, agent) = Ztunnel::start(&["--fault", "never-ack"]);
    let mut connection = agent.accept();
    let pod = Netns::new();
    connection.send(&encode(add("a")), &[&pod.0]);
    assert_silent(&mut connection);
    assert!(pod.listening().is_empty());
}

#[test]
fn silent_connects_and_never_says_hello() {
    let (_ztunnel, agent) = Ztunnel::start(&["--fault", "silent"]);
    assert_silent(&mut agent.accept_silent());
}

fn assert_silent(connection: &mut crate::agent::Connection) {
    let timeout = connection.0.set_read_timeout(Some(A_WHILE));
    timeout.expect("timeout");
    let error = connection.try_receive().expect_err("silence");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn nack_adds_refuses_every_add_and_goes_on() {
    let (ztunnel, agent) = Ztunnel::start(&["--fault", "nack-adds"]);
    let mut connection = agent.accept();
    let pod = Netns::new();
    let error = connection.add("a", &pod);
    assert!(error.starts_with("failure to start proxy : "), "{error}");
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(!ztunnel.ready());
    assert_eq!(connection.del("a"), ACK);
    assert!(ztunnel.ready());
}

#[test]
fn ack_delay_answers_late() {
    let (_ztunnel, agent) = Ztunnel::start(&["--fault", "ack-delay-ms=300"]);
    let mut connection = agent.accept();
    let start = Instant::now();
    assert_eq!(connection.snapshot_sent(), ACK);
    assert!(start.elapsed() >= A_WHILE);
}
