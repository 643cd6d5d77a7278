//! Services in operation: readiness, drains, metrics, limits of resources.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::common::asking::{number, scrape, scrape_all};
use anyhow::{Context as _, ensure};
use inpod_proto::{
    failure_of,
    podevents::v1::{ExplainPodRequest, pod_events_service_client::PodEventsServiceClient},
    types::v1::PodSelector,
};
use inpod_types::Reason;
use integration::{
    App, Call, HealthWatch, Named, Node, Pod, SERVICES, Spec, TIMEOUT, Verbs, bin, eventually,
    health, refusal, run,
};
use nix::sys::signal::Signal;
use tokio::runtime::Runtime;
use tonic::{Code, Request, Status};
use tonic_health::pb::health_check_response::ServingStatus;

/// Runs like an exec probe against the running service.
fn probe(node: &Node, service: &str, question: &str) -> anyhow::Result<String> {
    let program = bin(service)?;
    let run_dir = node.run_dir().display().to_string();
    let mut arguments = vec!["--run-dir", &run_dir, question];
    if service == "pod-events" {
        arguments.extend(["--node-name", "n", "--pods-from", "dir:/"]);
    }
    run(program.to_str().context("a path of text")?, &arguments)
}

/// Probes by HTTP, like the kubelet; returns status and body.
fn probe_by_http(node: &Node, address: &str, path: &str) -> anyhow::Result<(String, String)> {
    let netns = format!("--net={}", node.netns().path().display());
    let url = format!("http://{address}{path}");
    let curl = ["curl", "-sS", "-m", "2", "-w", "\n%{http_code}", &url];
    let answer = run("nsenter", &[&[netns.as_str()][..], &curl].concat())?;
    let (body, status) = answer.rsplit_once('\n').context("a status")?;
    Ok((status.to_owned(), body.to_owned()))
}

/// Returns a node with netconfig, broker, and a pod-events with `settings`, but no ztunnel.
fn without_ztunnel(settings: &[&str]) -> anyhow::Result<Node> {
    let node = Node::new()?;
    node.start("netconfig")?;
    node.start("ztunnel-broker")?;
    node.start_with("pod-events", &[&["--peer", "uid"], settings].concat())?;
    node.healthy("pod-events")?;
    Ok(node)
}

/// The ADD waits for a ztunnel.
fn waiting_add(node: &Node) -> anyhow::Result<thread::JoinHandle<i32>> {
    waiting_add_of(node, &node.sandbox(Spec::new("waiting").ambient())?)
}

fn waiting_add_of(node: &Node, pod: &Pod) -> anyhow::Result<thread::JoinHandle<i32>> {
    let call = node.call(Call::add, pod);
    let add = thread::spawn(move || call.run().map_or(-1, |outcome| outcome.code));
    eventually("the ADD is under way", TIMEOUT, || {
        let text = scrape(node, "pod-events")?;
        let under_way = number(&text, "inpod_pod_events_grpc_in_flight");
        ensure!(under_way == Some(1.0), "{under_way:?}");
        anyhow::Ok(())
    })?;
    Ok(add)
}

#[test]
fn every_service_tells_its_metrics_to_curl_on_its_own_socket() {
    let node = Node::running().unwrap();
    for service in SERVICES {
        let text = scrape(&node, service).unwrap();
        let prefix = format!("inpod_{}", service.replace('-', "_"));
        let version = env!("CARGO_PKG_VERSION");
        for (series, wanted) in [
            (format!("{prefix}_build_info{{version=\"{version}\"}}"), 1.0),
            (format!("{prefix}_ready"), 1.0),
        ] {
            assert_eq!(number(&text, &series), Some(wanted), "{series} in\n{text}");
        }
        let fds = format!("process_open_fds{{component=\"{service}\"}}");
        assert!(number(&text, &fds).unwrap() > 5.0, "{text}");
    }
}

fn component_up(all: &str, component: &str) -> Option<f64> {
    let series = format!("inpod_component_up{{component=\"{component}\"}}");
    number(all, &series)
}

#[test]
fn the_node_tells_all_metrics_on_one_port_and_one_that_is_away_costs_its_up() {
    let node = Node::running().unwrap();
    let all = scrape_all(&node).unwrap();
    for service in SERVICES {
        assert_eq!(component_up(&all, service), Some(1.0), "{all}");
    }
    assert_eq!(number(&all, "inpod_netconfig_claims"), Some(0.0), "{all}");

    node.stop("netconfig", Signal::SIGKILL).unwrap();
    let all = scrape_all(&node).unwrap();
    assert_eq!(component_up(&all, "netconfig"), Some(0.0), "{all}");
    assert_eq!(component_up(&all, "ztunnel-broker"), Some(1.0), "{all}");
    assert_eq!(number(&all, "inpod_netconfig_claims"), None, "{all}");
    let live = "inpod_ztunnel_broker_sessions{phase=\"live\"}";
    assert_eq!(number(&all, live), Some(1.0), "{all}");
}

#[test]
fn a_service_that_hangs_costs_a_scrape_a_second_and_its_up() {
    let node = Node::running().unwrap();
    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    let began = Instant::now();
    let all = scrape_all(&node).unwrap();
    let took = began.elapsed();
    node.signal("netconfig", Signal::SIGCONT).unwrap();
    assert_eq!(component_up(&all, "netconfig"), Some(0.0), "{all}");
    assert_eq!(component_up(&all, "ztunnel-broker"), Some(1.0), "{all}");
    assert!(took >= Duration::from_millis(900), "{took:?}");
}

#[test]
fn a_port_that_is_taken_keeps_no_pod_from_starting_and_is_served_when_it_is_free() {
    let node = Node::new().unwrap();
    let squatter = App::start(node.netns(), 15014).unwrap();
    SERVICES
        .iter()
        .for_each(|service| node.start(service).unwrap());
    node.start_ztunnel(&[]).unwrap();
    node.healthy("pod-events").unwrap();
    let status = node.api().status().unwrap();
    let reported = status
        .conditions
        .iter()
        .find(|condition| condition.name == "metrics-address");
    let reported = reported.unwrap();
    assert!(
        !reported.ok && reported.message.contains("127.0.0.1:15014"),
        "{reported:?}"
    );
    let pod = node.pod(Spec::new("a").ambient()).unwrap();
    node.until_whole(&pod.spec).unwrap();

    drop(squatter);
    eventually("metrics are served", TIMEOUT, || scrape_all(&node)).unwrap();
    node.ready().unwrap();
}

#[test]
fn an_add_is_counted_by_every_service_that_has_a_part_in_it() {
    let node = Node::running().unwrap();
    node.pod(Spec::new("a").ambient()).unwrap();
    node.pod(Spec::new("outside")).unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let verbs = Verbs::at(&socket).unwrap();
    let nobody = Named::at(&Spec::new("nobody"), "c", Path::new("/run/netns/n"));
    let add = verbs.add(&nobody, TIMEOUT);
    let refused = verbs.answers(vec![add]).unwrap().remove(0).result;
    assert_eq!(refused.unwrap_err().reason, Reason::PodUnknown);

    let text = scrape_all(&node).unwrap();
    for (series, wanted) in [
        (
            "inpod_pod_events_add_duration_seconds_count{outcome=\"ambient\"}",
            1.0,
        ),
        (
            "inpod_pod_events_add_duration_seconds_count{outcome=\"none\"}",
            1.0,
        ),
        (
            "inpod_pod_events_add_duration_seconds_count{outcome=\"POD_UNKNOWN\"}",
            1.0,
        ),
        (
            "inpod_pod_events_grpc_requests_total{method=\"PodEventsService/AddPod\",code=\"OK\"}",
            2.0,
        ),
        (
            "inpod_pod_events_grpc_requests_total{method=\"PodEventsService/AddPod\",code=\"NOT_FOUND\"}",
            1.0,
        ),
        ("inpod_pod_events_pods{state=\"enrolled\"}", 1.0),
        ("inpod_pod_events_pods{state=\"out\"}", 1.0),
        ("inpod_pod_events_condition{name=\"ztunnel\"}", 1.0),
        ("inpod_netconfig_claims", 1.0),
        (
            "inpod_netconfig_rules_duration_seconds_count{operation=\"apply\",result=\"OK\"}",
            1.0,
        ),
        (
            "inpod_ztunnel_broker_answers_total{verb=\"add\",result=\"ack\"}",
            1.0,
        ),
        ("inpod_ztunnel_broker_desired_workloads", 1.0),
        ("inpod_ztunnel_broker_workloads{phase=\"added\"}", 1.0),
        ("inpod_ztunnel_broker_workloads{phase=\"queued\"}", 0.0),
        ("inpod_ztunnel_broker_descriptors", 1.0),
        ("inpod_ztunnel_broker_seeded", 1.0),
        ("inpod_ztunnel_broker_queue_depth", 0.0),
        ("inpod_ztunnel_broker_condition{name=\"desired-set\"}", 1.0),
        ("inpod_ztunnel_broker_condition{name=\"ztunnel\"}", 1.0),
    ] {
        assert_eq!(number(&text, series), Some(wanted), "{series} in\n{text}");
    }
}

#[test]
fn a_pod_whose_add_fails_counts_until_an_add_succeeds() {
    let node = without_ztunnel(&[]).unwrap();
    let pod = node.sandbox(Spec::new("a").ambient()).unwrap();
    let failing = || {
        let series = "inpod_pod_events_pods_failing{reason=\"ZTUNNEL_NEVER_CONNECTED\"}";
        number(&scrape_all(&node).unwrap(), series)
    };
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let verbs = Verbs::at(&socket).unwrap();
    let add = verbs.add(&Named::of(&pod), Duration::from_secs(5));
    let refused = verbs.answers(vec![add]).unwrap().remove(0).result;
    assert_eq!(refused.unwrap_err().reason, Reason::ZtunnelNeverConnected);
    assert_eq!(failing(), Some(1.0));
    // The runtime repeats the ADD at once, which waits for ztunnel again.
    let add = waiting_add_of(&node, &pod).unwrap();
    assert_eq!(failing(), Some(1.0));
    node.start_ztunnel(&[]).unwrap();
    assert_eq!(add.join().unwrap(), 0);
    assert_eq!(failing(), None);
}

#[test]
fn a_caller_who_may_not_change_is_audited_and_counted() {
    let node = Node::new().unwrap();
    let policy = ["--peer", "cgroup:/a/place/where/nobody/is"];
    node.start_with("netconfig", &policy).unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "netconfig");
    let call = "/inpod.netconfig.v1.NetconfigService/ApplyRules";
    eventually("it refuses", TIMEOUT, || {
        let refused = refusal(&socket, call)?;
        ensure!(refused.reason == Reason::CallerRefused, "{refused:?}");
        Ok(())
    })
    .unwrap();
    let text = scrape(&node, "netconfig").unwrap();
    let series = "inpod_netconfig_refused_calls_total{class=\"service\"}";
    assert_eq!(number(&text, series), Some(1.0), "{text}");
    let log = node.tail("netconfig", 50);
    let line = log.lines().find(|line| line.contains("Refused a caller"));
    let line = line.unwrap_or_else(|| panic!("no line in\n{log}"));
    for part in ["WARN", "uid=0", "pid=", "cgroup=/", "class=Service", call] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

#[test]
fn over_the_limit_a_call_is_refused_with_when_to_come_back_and_the_rest_goes_on() {
    let node = without_ztunnel(&["--max-calls", "1"]).unwrap();
    let add = waiting_add(&node).unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    // ADDs have their own concurrency group: other calls are served.
    node.api().status().unwrap();
    let another = node.sandbox(Spec::new("another").ambient()).unwrap();
    let another = node.call(Call::add, &another).run().unwrap();
    assert!(another.stdout.contains("OVERLOADED"), "{another:?}");
    let call = "/inpod.podevents.v1.PodEventsService/AddPod";
    let refused = refusal(&socket, call).unwrap();
    assert_eq!(refused.reason, Reason::Overloaded);
    assert!(refused.retry_after.is_some(), "{refused:?}");
    assert!(refused.message.contains("max_calls"), "{refused:?}");
    assert_eq!(health(&socket, "").unwrap(), ServingStatus::Serving);
    node.start_ztunnel(&[]).unwrap();
    assert_eq!(
        add.join().unwrap(),
        0,
        "the ADD that had its place succeeds"
    );
    node.api().status().unwrap();
}

fn explain_by(socket: &Path, limit: Duration) -> Status {
    let runtime = Runtime::new().unwrap();
    let mut request = Request::new(ExplainPodRequest {
        pod: Some(PodSelector {
            namespace: "shop".to_owned(),
            name: "a".to_owned(),
            uid: String::new(),
        }),
    });
    request.set_timeout(limit);
    let answered = runtime.block_on(async {
        let mut client = PodEventsServiceClient::new(inpod_service::channel(socket));
        client.explain_pod(request).await
    });
    answered.unwrap_err()
}

#[test]
fn a_caller_whose_time_runs_out_is_told_why_and_what_helps() {
    let node = Node::running().unwrap();
    node.pod(Spec::new("a").ambient()).unwrap();
    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let late = explain_by(&socket, Duration::from_secs(2));
    node.signal("netconfig", Signal::SIGCONT).unwrap();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    let failure = failure_of(&late);
    assert_eq!(failure.reason, Reason::DeadlineExceeded, "{failure:?}");
}

#[test]
fn it_is_ready_when_an_add_could_be_served_and_alive_before() {
    let node = Node::new().unwrap();
    node.start("pod-events").unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    eventually("it answers", TIMEOUT, || health(&socket, "")).unwrap();
    assert_eq!(health(&socket, "").unwrap(), ServingStatus::NotServing);
    assert_eq!(health(&socket, "live").unwrap(), ServingStatus::Serving);
    let error = probe(&node, "pod-events", "--check")
        .unwrap_err()
        .to_string();
    assert!(error.contains("in-step: "), "{error}");
    probe(&node, "pod-events", "--check-live").unwrap();
    let text = scrape(&node, "pod-events").unwrap();
    assert_eq!(number(&text, "inpod_pod_events_ready"), Some(0.0), "{text}");
    let in_step = "inpod_pod_events_condition{name=\"in-step\"}";
    assert_eq!(number(&text, in_step), Some(0.0), "{text}");

    node.start("netconfig").unwrap();
    node.start("ztunnel-broker").unwrap();
    node.healthy("pod-events").unwrap();
    probe(&node, "pod-events", "--check").unwrap();
    let text = scrape(&node, "pod-events").unwrap();
    let ztunnel = "inpod_pod_events_condition{name=\"ztunnel\"}";
    assert_eq!(
        number(&text, ztunnel),
        Some(0.0),
        "a ztunnel is not waited for"
    );

    node.stop("netconfig", Signal::SIGKILL).unwrap();
    eventually("it is not ready any more", TIMEOUT, || {
        let reported = health(&socket, "")?;
        ensure!(reported == ServingStatus::NotServing, "{reported:?}");
        anyhow::Ok(())
    })
    .unwrap();
    probe(&node, "pod-events", "--check-live").unwrap();
}

#[test]
fn a_probe_by_http_means_what_one_by_a_program_does_and_each_service_answers_for_itself() {
    let node = Node::new().unwrap();
    let address = |service: &str| {
        let port = SERVICES.iter().position(|it| *it == service).unwrap() + 15041;
        format!("127.0.0.1:{port}")
    };
    let start = |service: &str| {
        let settings = ["--peer", "uid", "--health-address", &address(service)];
        node.start_with(service, &settings).unwrap();
        eventually("it answers", TIMEOUT, || {
            probe_by_http(&node, &address(service), "/livez")
        })
        .unwrap()
    };
    let ask = |service: &str, path| probe_by_http(&node, &address(service), path);
    let ok = ("200".to_owned(), "ok\n".to_owned());
    assert_eq!(start("pod-events"), ok);
    let (status, reasons) = ask("pod-events", "/readyz").unwrap();
    assert_eq!(status, "503");
    assert!(reasons.contains("in-step: "), "{reasons}");
    probe(&node, "pod-events", "--check").unwrap_err();

    assert_eq!(start("netconfig"), ok);
    assert_eq!(start("ztunnel-broker"), ok);
    for service in ["pod-events", "netconfig", "ztunnel-broker"] {
        eventually("it is ready", TIMEOUT, || {
            let answer = ask(service, "/readyz")?;
            ensure!(answer == ok, "{service}: {answer:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }
    probe(&node, "pod-events", "--check").unwrap();

    node.signal("netconfig", Signal::SIGSTOP).unwrap();
    ask("netconfig", "/livez").unwrap_err();
    for service in ["pod-events", "ztunnel-broker"] {
        assert_eq!(ask(service, "/livez").unwrap(), ok, "{service}");
    }
    node.signal("netconfig", Signal::SIGCONT).unwrap();
}

#[test]
fn a_drain_is_told_lets_calls_end_and_a_second_signal_cuts_it_short() {
    let node = without_ztunnel(&[]).unwrap();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let mut watch = HealthWatch::start(&socket).unwrap();
    watch.until(ServingStatus::Serving).unwrap();
    let add = waiting_add(&node).unwrap();
    node.signal("pod-events", Signal::SIGTERM).unwrap();
    watch.until(ServingStatus::NotServing).unwrap();
    probe(&node, "pod-events", "--check").unwrap_err();
    assert!(!add.is_finished(), "the ADD goes on");

    node.stop("pod-events", Signal::SIGTERM).unwrap();
    let log = node.tail("pod-events", 50);
    assert!(log.contains("Exiting on a second signal"), "{log}");
    assert_ne!(add.join().unwrap(), 0);
}

#[test]
fn a_drain_waits_for_a_call_that_ends_in_time() {
    let node = without_ztunnel(&[]).unwrap();
    let add = waiting_add(&node).unwrap();
    node.signal("pod-events", Signal::SIGTERM).unwrap();
    eventually("the drain has begun", TIMEOUT, || {
        let log = node.tail("pod-events", 20);
        ensure!(log.contains("Draining"), "{log}");
        Ok(())
    })
    .unwrap();
    node.start_ztunnel(&[]).unwrap();
    assert_eq!(add.join().unwrap(), 0);
}
