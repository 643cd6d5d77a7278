//! The broker on a real socket with scripted ztunnels. Time is virtual.

use std::{fs, os::unix::fs::PermissionsExt as _, sync::atomic::Ordering, time::Duration};

use inpod_types::{Failure, Reason};
use tokio::time::Instant;
use ztunnel_broker::{error::AddError, zds::Listener};

use crate::bench::{ACK_TIMEOUT, Bench, SOON, Ztunnel, describe, is_netns, workload};

const LONG: Duration = Duration::from_secs(60);

fn reason(error: AddError) -> Reason {
    Failure::from(error).reason
}

fn message(error: AddError) -> String {
    Failure::from(error).message
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_before_the_set_is_known() {
    let bench = Bench::start();
    let ztunnel = bench.ztunnel().await;
    assert!(ztunnel.within(LONG).await.is_none());
    bench.set(0, vec![]);
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_gives_each_netns_once_and_ends_once() {
    let bench = Bench::start();
    bench.set(
        2,
        vec![workload("c1", "p1", 0, 1), workload("c2", "p2", 1, 2)],
    );
    let ztunnel = bench.ztunnel().await;
    for (number, expected) in ["add p1", "add p2"].iter().enumerate() {
        let (payload, fds) = ztunnel.next().await;
        assert_eq!(describe(&payload), *expected);
        assert!(fds.len() == 1 && is_netns(&fds[0], number), "{fds:?}");
        ztunnel.ack().await;
    }
    let (payload, fds) = ztunnel.next().await;
    assert_eq!(
        (describe(&payload).as_str(), fds.len()),
        ("snapshot sent", 0)
    );
    ztunnel.ack().await;
    assert!(ztunnel.within(LONG).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn one_message_waits_for_its_answer_before_the_next_is_sent() {
    let bench = Bench::start();
    bench.set(
        2,
        vec![workload("c1", "p1", 0, 1), workload("c2", "p2", 1, 2)],
    );
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    let almost = ACK_TIMEOUT - Duration::from_secs(1);
    assert!(ztunnel.within(almost).await.is_none());
    ztunnel.ack().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p2");
}

#[tokio::test(start_paused = true)]
async fn a_live_add_succeeds_with_its_acknowledgement() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let add = bench.add(workload("c1", "p1", 0, 1), LONG);
    let (payload, fds) = ztunnel.next().await;
    assert_eq!((describe(&payload).as_str(), fds.len()), ("add p1", 1));
    assert!(!add.is_finished());
    ztunnel.ack().await;
    assert_eq!(add.await.unwrap().unwrap().0, 1);
}

#[tokio::test(start_paused = true)]
async fn a_repeated_add_is_confirmed_without_a_message_to_ztunnel() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let add = bench.add(workload("c1", "p1", 0, 1), LONG);
    ztunnel.ack_next().await;
    add.await.unwrap().unwrap();
    let again = bench.add(workload("c1", "p1", 0, 1), LONG).await.unwrap();
    assert_eq!(again.unwrap().0, 1);
    assert!(ztunnel.within(LONG).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_live_add_does_not_wait_for_the_rest_of_the_snapshot() {
    let bench = Bench::start();
    bench.set(
        3,
        (1..=3)
            .map(|n| workload(&format!("c{n}"), &format!("p{n}"), 0, n))
            .collect(),
    );
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    let add = bench.add(workload("c9", "p9", 1, 9), LONG);
    // The add is known once its descriptor is fetched.
    while bench.hub.list().1.len() < 4 {
        tokio::task::yield_now().await;
    }
    ztunnel.ack().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p9");
    assert!(add.await.unwrap().is_ok());
    assert_eq!(describe(&ztunnel.ack_next().await), "add p2");
}

#[tokio::test(start_paused = true)]
async fn an_add_without_any_ztunnel_fails_in_its_callers_time() {
    let bench = Bench::start();
    bench.set(0, vec![]);
    let start = Instant::now();
    let wait = Duration::from_secs(27);
    let error = bench
        .add(workload("c1", "p1", 0, 1), wait)
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(reason(error), Reason::ZtunnelNeverConnected);
    assert!(start.elapsed() < wait + Duration::from_secs(1));
    assert_eq!(bench.hub.list().1.len(), 1, "it stays desired");
}

#[tokio::test(start_paused = true)]
async fn an_add_waits_for_a_ztunnel_that_comes_in_time() {
    let bench = Bench::start();
    bench.set(0, vec![]);
    let add = bench.add(workload("c1", "p1", 0, 1), LONG);
    tokio::time::sleep(Duration::from_secs(15)).await;
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p1");
    assert!(add.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_lost_ztunnel_is_reported_with_the_time_and_the_cause() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    drop(ztunnel);
    let wait = Duration::from_secs(7);
    let error = bench
        .add(workload("c1", "p1", 0, 1), wait)
        .await
        .unwrap()
        .unwrap_err();
    let expected = "cannot add the workload: ztunnel was lost 7 s ago (it closed the connection) and has not come back";
    assert_eq!(message(error), expected);
}

#[tokio::test(start_paused = true)]
async fn a_silent_ztunnel_fails_its_caller_first_and_is_closed_by_its_own_clock() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let start = Instant::now();
    let wait = Duration::from_secs(3);
    let add = bench.add(workload("c1", "p1", 0, 1), wait);
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    assert_eq!(
        reason(add.await.unwrap().unwrap_err()),
        Reason::ZtunnelSilent
    );
    assert!(start.elapsed() < ACK_TIMEOUT);
    assert!(ztunnel.hung_up(LONG).await);
    assert!(start.elapsed() >= ACK_TIMEOUT && start.elapsed() < ACK_TIMEOUT + SOON);
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_snapshot_is_reported() {
    let bench = Bench::start();
    bench.set(1, vec![workload("c1", "p1", 0, 1)]);
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    let wait = Duration::from_secs(3);
    let error = bench
        .add(workload("c2", "p2", 1, 2), wait)
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(reason(error), Reason::ZtunnelSnapshotUnfinished);
}

#[tokio::test(start_paused = true)]
async fn an_add_stays_desired_without_time_and_without_its_caller_until_it_is_removed() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let late = bench.add(workload("c1", "p1", 0, 1), Duration::from_secs(3));
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    assert!(late.await.unwrap().is_err());
    let gone = bench.add(workload("c2", "p2", 1, 2), LONG);
    tokio::time::sleep(SOON).await;
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    ztunnel.ack().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p2");
    assert!(ztunnel.within(LONG).await.is_none());
    bench.remove("c1", 3);
    assert_eq!(describe(&ztunnel.ack_next().await), "del p1");
    bench.remove("c2", 4);
    assert_eq!(describe(&ztunnel.ack_next().await), "del p2");
}

#[tokio::test(start_paused = true)]
async fn the_late_removal_of_an_old_sandbox_leaves_the_pod() {
    let (bench, ztunnel) = Bench::live(vec![workload("old", "p", 0, 1)]).await;
    let add = bench.add(workload("new", "p", 1, 2), LONG);
    let (payload, fds) = ztunnel.next().await;
    assert_eq!(describe(&payload), "add p");
    assert!(is_netns(&fds[0], 1));
    ztunnel.ack().await;
    add.await.unwrap().unwrap();
    bench.remove("old", 3);
    assert!(ztunnel.within(LONG).await.is_none());
    bench.remove("new", 4);
    assert_eq!(describe(&ztunnel.ack_next().await), "del p");
}

#[tokio::test(start_paused = true)]
async fn a_long_refusal_is_read_whole_reported_and_taken_back() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let add = bench.add(workload("c1", "p1", 0, 1), LONG);
    ztunnel.next().await;
    let nack = format!("failure to start proxy : {}", "x".repeat(1500));
    ztunnel.nack(&nack).await;
    let error = add.await.unwrap().unwrap_err();
    let expected = format!(
        "cannot add the workload: ztunnel refused the workload: {}",
        &nack[..512]
    );
    assert_eq!(message(error), expected);
    assert_eq!(describe(&ztunnel.ack_next().await), "del p1");
    bench.remove("c1", 2);
    assert!(
        ztunnel.within(LONG).await.is_none(),
        "it is not in the set, so it is not tried again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_workload_of_the_set_is_taken_back_and_tried_again_later() {
    let bench = Bench::start();
    bench.set(1, vec![workload("c1", "p1", 0, 1)]);
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    ztunnel.nack("failure to start proxy : in use").await;
    assert_eq!(describe(&ztunnel.ack_next().await), "del p1");
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
    for seconds in [5, 10, 20, 40, 60, 60] {
        let start = Instant::now();
        let (payload, fds) = ztunnel.within(LONG * 2).await.unwrap();
        assert_eq!((describe(&payload).as_str(), fds.len()), ("add p1", 1));
        assert!(start.elapsed().abs_diff(Duration::from_secs(seconds)) < Duration::from_secs(1));
        ztunnel.nack("failure to start proxy : in use").await;
        assert_eq!(describe(&ztunnel.ack_next().await), "del p1");
    }
}

#[tokio::test(start_paused = true)]
async fn a_workload_without_a_descriptor_is_kept_and_added_when_it_is_there() {
    let bench = Bench::start();
    bench.netconfig.store(false, Ordering::Relaxed);
    let ztunnel = bench.ztunnel().await;
    bench.set(1, vec![workload("c1", "p1", 0, 1)]);
    let almost = Duration::from_millis(1900);
    assert!(
        ztunnel.within(almost).await.is_none(),
        "the fetching has its chance"
    );
    assert_eq!(describe(&ztunnel.ack_next().await), "keep p1");
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
    bench.netconfig.store(true, Ordering::Relaxed);
    let (payload, fds) = ztunnel.next().await;
    assert_eq!((describe(&payload).as_str(), fds.len()), ("add p1", 1));
}

#[tokio::test(start_paused = true)]
async fn an_add_of_an_unknown_claim_fails_at_once() {
    let (bench, _ztunnel) = Bench::live(vec![]).await;
    bench.netconfig.store(false, Ordering::Relaxed);
    let error = bench
        .add(workload("c1", "p1", 0, 1), LONG)
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(reason(error), Reason::ClaimUnknown);
    assert!(bench.hub.list().1.is_empty());
}

#[tokio::test(start_paused = true)]
async fn every_ztunnel_gets_its_own_snapshot_and_every_change() {
    let (bench, first) = Bench::live(vec![workload("c1", "p1", 0, 1)]).await;
    let second = bench.ztunnel().await;
    assert_eq!(describe(&second.ack_next().await), "add p1");
    assert_eq!(describe(&second.ack_next().await), "snapshot sent");
    let add = bench.add(workload("c2", "p2", 1, 2), LONG);
    assert_eq!(describe(&second.ack_next().await), "add p2");
    add.await.unwrap().unwrap();
    assert_eq!(describe(&first.ack_next().await), "add p2");
    bench.remove("c1", 3);
    assert_eq!(describe(&first.ack_next().await), "del p1");
    assert_eq!(describe(&second.ack_next().await), "del p1");
}

#[tokio::test(start_paused = true)]
async fn a_ztunnel_that_reconnects_gets_a_new_snapshot() {
    let (bench, ztunnel) = Bench::live(vec![workload("c1", "p1", 0, 1)]).await;
    drop(ztunnel);
    let ztunnel = bench.ztunnel().await;
    assert_eq!(describe(&ztunnel.ack_next().await), "add p1");
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
}

#[tokio::test(start_paused = true)]
async fn whatever_is_no_answer_ends_the_session() {
    for packet in [&b"\xff\xff"[..], b"\x08\x01", b"", b"\x0a\x00"] {
        let (_bench, ztunnel) = Bench::live(vec![]).await;
        // Without a request, even an acknowledgement is unsolicited.
        ztunnel.send(packet).await;
        assert!(ztunnel.hung_up(SOON).await, "{packet:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_without_a_hello_is_disconnected() {
    let bench = Bench::start();
    bench.set(0, vec![]);
    let mute = Ztunnel::connect(&bench.socket()).await;
    assert!(mute.hung_up(ACK_TIMEOUT + SOON).await);
    let wrong = Ztunnel::connect(&bench.socket()).await;
    wrong.send(b"\x08\x07").await;
    assert!(wrong.hung_up(SOON).await);
}

#[tokio::test(start_paused = true)]
async fn a_stopping_broker_hangs_up_without_a_message() {
    let (bench, ztunnel) = Bench::live(vec![workload("c1", "p1", 0, 1)]).await;
    let add = bench.add(workload("c2", "p2", 1, 2), LONG);
    assert_eq!(describe(&ztunnel.next().await.0), "add p2");
    bench.stop();
    assert!(ztunnel.hung_up(SOON).await);
    assert!(add.await.unwrap().is_err());
    assert_eq!(
        bench.hub.list().1.len(),
        2,
        "nothing is removed on the way out"
    );
}

#[tokio::test(start_paused = true)]
async fn connections_are_taken_five_a_second() {
    let bench = Bench::start();
    bench.set(0, vec![]);
    let start = Instant::now();
    for _ in 0..15 {
        let ztunnel = bench.ztunnel().await;
        ztunnel.next().await;
    }
    assert!(
        start.elapsed() >= Duration::from_millis(1900),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn a_stale_socket_is_replaced_a_served_one_is_not_and_only_this_user_may_open_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ztunnel/ztunnel.sock");
    let first = Listener::bind(&path).unwrap();
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let error = Listener::bind(&path).unwrap_err().to_string();
    assert!(error.contains("already served"), "{error}");
    drop(first);
    Listener::bind(&path).unwrap();
}
