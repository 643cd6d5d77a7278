use inpod_proto::failure_of;

use super::*;
use crate::{descriptors::Descriptors, fixture, hub::now, peer::Peer};

fn handler() -> (tokio::sync::watch::Sender<bool>, Handler) {
    let hub = Hub::new(
        Descriptors::new("/nonexistent/netns.sock"),
        Duration::from_secs(10),
        inpod_service::Readiness::default(),
    );
    let (stop, shutdown) = Shutdown::manual();
    (
        stop,
        Handler::new(hub, "run-1", Duration::from_secs(3), shutdown),
    )
}

fn workload(container: &str, netns: u64) -> WireWorkload {
    (&fixture::workload(container, "p", netns, 1)).into()
}

fn set(workloads: Vec<WireWorkload>) -> Request<SetWorkloadsRequest> {
    Request::new(SetWorkloadsRequest {
        instance_id: "run-1".to_owned(),
        revision: 1,
        workloads,
    })
}

fn add(instance_id: &str, workload: WireWorkload) -> Request<AddWorkloadRequest> {
    Request::new(AddWorkloadRequest {
        instance_id: instance_id.to_owned(),
        workload: Some(workload),
    })
}

fn failure<T: std::fmt::Debug>(result: Result<T, Status>) -> Failure {
    failure_of(&result.unwrap_err())
}

#[test]
fn an_add_leaves_its_caller_the_reserve_or_half_of_a_short_time() {
    let now = Instant::now();
    let seconds = Duration::from_secs;
    let reserve = seconds(3);
    assert_eq!(
        add_deadline(now, now + seconds(30), reserve),
        now + seconds(27)
    );
    assert_eq!(
        add_deadline(now, now + seconds(2), reserve),
        now + seconds(1)
    );
    assert_eq!(add_deadline(now, now, reserve), now);
}

#[tokio::test]
async fn a_malformed_workload_of_a_set_is_named_and_nothing_is_stored() {
    let (_stop, handler) = handler();
    let bad = WireWorkload {
        revision: 0,
        ..workload("c2", 1)
    };
    let answer = handler
        .set_workloads(set(vec![workload("c1", 1), bad]))
        .await;
    assert_eq!(failure(answer).field, "workloads[1].revision");
    assert!(!handler.hub.watch().0);
}

#[tokio::test]
async fn an_add_without_a_netns_or_a_descriptor_reports_which() {
    let (_stop, handler) = handler();
    handler.set_workloads(set(vec![])).await.unwrap();
    let answer = handler.add_workload(add("run-1", workload("c", 0))).await;
    assert_eq!(failure(answer).field, "workload.netns");
    let answer = handler.add_workload(add("run-1", workload("c", 1))).await;
    let failure = failure(answer);
    assert_eq!(failure.reason, Reason::DescriptorUnavailable);
    assert!(
        failure.message.contains("/nonexistent/netns.sock"),
        "{failure}"
    );
}

#[tokio::test]
async fn the_list_shows_the_set_by_sandbox_and_whether_its_descriptors_are_held() {
    let (_stop, handler) = handler();
    handler
        .set_workloads(set(vec![workload("c2", 2), workload("c1", 1)]))
        .await
        .unwrap();
    let list = handler
        .list_workloads(Request::new(ListWorkloadsRequest {}))
        .await
        .unwrap();
    let list = list.into_inner();
    assert!(list.seeded && list.workloads.iter().all(|it| !it.descriptor_held));
    let listed: Vec<_> = list
        .workloads
        .into_iter()
        .filter_map(|it| it.workload)
        .collect();
    assert_eq!(listed, [workload("c1", 1), workload("c2", 2)]);
}

#[tokio::test(start_paused = true)]
async fn a_watcher_gets_the_state_then_its_end_then_changes() {
    let (stop, handler) = handler();
    let one = set(vec![workload("c", 0)]);
    handler.set_workloads(one).await.unwrap();
    let first = handler.hub.state().connect(Peer::from_pid(7), now());
    handler.hub.state().hello(first, now());
    let watch = handler
        .watch_sessions(Request::new(WatchSessionsRequest {}))
        .await
        .unwrap();
    {
        let mut state = handler.hub.state();
        state.next(first, now()).0.unwrap();
        state.ack(first, Ok(()), now()).unwrap();
        let removed = state.remove(&fixture::sandbox("c"), Revision(2), now());
        removed.unwrap();
        state.next(first, now()).0.unwrap();
        state.ack(first, Ok(()), now()).unwrap();
        state.disconnect(first, "it closed the connection", now());
    }
    #[expect(deprecated, reason = "the match covers every event")]
    let events = watch
        .into_inner()
        .map(|event| match event.unwrap().event.unwrap() {
            Event::InstanceId(id) => id,
            Event::Session(it) => format!("session {} {}", it.session_id, it.phase().as_str_name()),
            Event::WorkloadState(it) => panic!("{it:?} is sent no more"),
            Event::StateComplete(it) => format!("complete, seeded: {}", it.seeded),
        });
    // The hub outlives the watch, so the stream ends only on shutdown.
    let mut events = std::pin::pin!(events);
    let mut all = Vec::new();
    while let Ok(Some(event)) = tokio::time::timeout(Duration::from_secs(1), events.next()).await {
        all.push(event);
    }
    stop.send_replace(true);
    assert!(events.next().await.is_none());
    let expected = [
        "run-1",
        "session 1 SESSION_PHASE_SNAPSHOT",
        "complete, seeded: true",
        "session 1 SESSION_PHASE_LIVE",
        "session 1 SESSION_PHASE_CLOSED",
    ];
    assert_eq!(all, expected);
}

#[tokio::test(start_paused = true)]
async fn a_watcher_that_falls_behind_is_cut_off() {
    let (_stop, handler) = handler();
    let watch = handler
        .watch_sessions(Request::new(WatchSessionsRequest {}))
        .await
        .unwrap();
    for _ in 0..10_000 {
        let id = handler.hub.state().connect(Peer::from_pid(1), now());
        let mut state = handler.hub.state();
        state.disconnect(id, "it closed the connection", now());
    }
    let events: Vec<_> = watch.into_inner().collect().await;
    let last = events.into_iter().last().unwrap();
    assert_eq!(failure(last).reason, Reason::Overloaded);
}

#[tokio::test(start_paused = true)]
async fn which_pods_are_ztunnels_is_taken_whole_or_not_at_all() {
    let (_stop, handler) = handler();
    let named = |instance_id: &str, pod_uids: &[&str]| {
        Request::new(SetZtunnelsRequest {
            instance_id: instance_id.to_owned(),
            pod_uids: pod_uids.iter().map(|uid| (*uid).to_owned()).collect(),
        })
    };
    let ztunnels = handler.hub.ztunnels();
    for (request, reason) in [
        (named("run-0", &["z"]), Reason::InstanceMismatch),
        (named("run-1", &["z", "no uid"]), Reason::InvalidField),
    ] {
        let refused = handler.set_ztunnels(request).await;
        assert_eq!(failure(refused).reason, reason);
        assert_eq!(*ztunnels.borrow(), None);
    }
    handler.set_ztunnels(named("run-1", &["z"])).await.unwrap();
    assert_eq!(*ztunnels.borrow(), Some([fixture::uid("z")].into()));
}

#[tokio::test(start_paused = true)]
async fn a_list_shows_who_a_ztunnel_is_what_it_refused_and_the_suspicion_against_a_pod() {
    let (_stop, handler) = handler();
    handler
        .set_workloads(set(vec![workload("c", 0)]))
        .await
        .unwrap();
    let peer = Peer::new(7, Some("/kubepods/z".to_owned()), Some(fixture::uid("z")));
    for _ in 0..2 {
        let id = handler.hub.state().connect(peer.clone(), now());
        handler.hub.state().hello(id, now());
        drop(handler.hub.state().next(id, now()));
        let mut state = handler.hub.state();
        state.disconnect(id, "it closed the connection", now());
    }
    handler.hub.state().connect(peer, now());
    let request = Request::new(ListWorkloadsRequest {});
    let list = handler.list_workloads(request).await.unwrap().into_inner();
    let session = &list.sessions[0];
    assert_eq!((&*session.cgroup, &*session.pod_uid), ("/kubepods/z", "z"));
    assert!(list.workloads[0].known_since.is_some());
    let suspicion = list.workloads[0].suspicion.as_ref().unwrap();
    assert_eq!(
        (suspicion.sessions_lost, &*suspicion.cause),
        (2, "it closed the connection")
    );
    assert!(suspicion.retry_at.is_some());
}
