//! The broker on a real socket with scripted ztunnels. Time is virtual.

use std::{sync::atomic::Ordering, time::Duration};

use inpod_types::Reason;
use tokio::time::Instant;

use crate::bench::{ACK_TIMEOUT, Bench, SOON, describe, workload};

const LONG: Duration = Duration::from_secs(60);

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
    while bench.hub.list().workloads.len() < 4 {
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
    assert_eq!(error.reason, Reason::ZtunnelNeverConnected);
    assert!(start.elapsed() < wait + Duration::from_secs(1));
    assert_eq!(bench.hub.list().workloads.len(), 1, "it stays desired");
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
    let expected = "ztunnel was lost 7 s ago (it closed the connection) and has not come back";
    assert_eq!(error.message, expected);
}

#[tokio::test(start_paused = true)]
async fn a_silent_ztunnel_fails_its_caller_first_and_is_closed_by_its_own_clock() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let start = Instant::now();
    let wait = Duration::from_secs(3);
    let add = bench.add(workload("c1", "p1", 0, 1), wait);
    assert_eq!(describe(&ztunnel.next().await.0), "add p1");
    assert_eq!(
        add.await.unwrap().unwrap_err().reason,
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
    assert_eq!(error.reason, Reason::ZtunnelSnapshotUnfinished);
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
async fn a_long_refusal_is_read_whole_reported_and_taken_back() {
    let (bench, ztunnel) = Bench::live(vec![]).await;
    let add = bench.add(workload("c1", "p1", 0, 1), LONG);
    ztunnel.next().await;
    let nack = format!("failure to start proxy : {}", "x".repeat(1500));
    ztunnel.nack(&nack).await;
    let error = add.await.unwrap().unwrap_err();
    let expected = format!("ztunnel refused the workload: {}", &nack[..512]);
    assert_eq!(error.message, expected);
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
    assert_eq!(describe(&ztunnel.ack_next().await), "snapshot sent");
    assert_eq!(describe(&ztunnel.ack_next().await), "del p1");
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
    assert_eq!(error.reason, Reason::ClaimUnknown);
    assert!(bench.hub.list().workloads.is_empty());
}
