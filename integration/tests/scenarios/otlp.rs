//! The real binaries' spans at a collector: one tree for one ADD; a missing, hanging or slow collector costs only
//! spans. `./integration/test netns` builds the binaries with the feature.

mod collector;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use futures_util::future::join_all;
use inpod_proto::netconfig::v1::{
    ListClaimsRequest, netconfig_service_client::NetconfigServiceClient,
};
use inpod_service::otlp::wire::{ERROR, INTERNAL, SERVER, Value};
use integration::{Call, Node, SERVICES, Spec, TIMEOUT, eventually, number};
use nix::sys::signal::Signal;
use tokio::runtime::Runtime;
use tonic::Request;

use collector::{Collector, Received, hex};

/// An export's timeout in `inpod-service`.
const EXPORT: Duration = Duration::from_secs(5);

/// An ADD's limit in seconds, shorter than a hanging export.
const ADD: u64 = 4;

/// Twice the spans in queue and in flight.
const FLOOD: usize = 6_000;

struct Bench {
    node: Node,
    runtime: Runtime,
}

impl Bench {
    /// Services export to this socket, with or without a listener.
    fn new() -> Self {
        Self {
            node: Node::new().unwrap(),
            runtime: Runtime::new().unwrap(),
        }
    }

    fn socket(&self) -> PathBuf {
        self.node.run_dir().with_file_name("otlp.sock")
    }

    fn start(&self) {
        for service in SERVICES {
            self.start_one(service);
        }
        self.node.start_ztunnel(&[]).unwrap();
        self.node.ready().unwrap();
    }

    fn start_one(&self, service: &str) {
        let endpoint = format!("unix:{}", self.socket().display());
        let settings = ["--peer", "uid", "--otlp-endpoint", &endpoint];
        self.node.start_with(service, &settings).unwrap();
    }

    /// All calls must succeed; only the trace context's flags matter.
    fn calls(&self, count: usize, flags: &str) {
        let channel =
            || inpod_service::channel(&inpod_service::socket(&self.node.run_dir(), "netconfig"));
        let call = |client: NetconfigServiceClient<_>, number: usize| {
            let header = format!("00-{:032x}-00f067aa0ba902b7-{flags}", number + 1);
            let mut request = Request::new(ListClaimsRequest {});
            request.set_timeout(TIMEOUT);
            let metadata = request.metadata_mut();
            metadata.insert("traceparent", header.parse().unwrap());
            let mut client = client;
            async move { client.list_claims(request).await.map(drop) }
        };
        self.runtime.block_on(async {
            let client = NetconfigServiceClient::new(channel());
            for first in (0..count).step_by(200) {
                let numbers = first..count.min(first + 200);
                let calls = numbers.map(|number| call(client.clone(), number));
                for answer in join_all(calls).await {
                    answer.unwrap();
                }
            }
        });
    }

    fn counted(&self, service: &str, result: &str) -> f64 {
        let socket = inpod_service::socket(&self.node.run_dir(), service);
        let metrics = self
            .runtime
            .block_on(inpod_service::metrics::fetch(&socket))
            .unwrap();
        let prefix = service.replace('-', "_");
        let name = format!("inpod_{prefix}_otlp_spans_total{{result=\"{result}\"}}");
        number(&metrics, &name)
    }

    fn until_counted(&self, service: &str, result: &str) {
        eventually(&format!("{service} counts {result}"), TIMEOUT, || {
            let count = self.counted(service, result);
            ensure!(count > 0.5, "it counts {count}");
            Ok(())
        })
        .unwrap();
    }

    fn logged(&self, service: &str, words: &str) -> usize {
        let log = self.node.tail(service, usize::MAX);
        log.lines().filter(|line| line.contains(words)).count()
    }
}

/// Adds a mesh pod by the plugin; returns the trace that it began.
fn add(node: &Node, name: &str) -> String {
    let pod = node.sandbox(Spec::new(name).ambient()).unwrap();
    node.until_known(&pod.spec).unwrap();
    let outcome = node
        .call(Call::add, &pod)
        .timeout_seconds(ADD)
        .run()
        .unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let (_, rest) = outcome.stderr.split_once("\"trace_id\":\"").unwrap();
    rest.get(..32).unwrap().to_owned()
}

fn one<'a>(spans: &'a [Received], name: &str) -> anyhow::Result<&'a Received> {
    let mut named = spans.iter().filter(|it| it.span.name == name);
    let span = named.next().with_context(|| format!("no {name}"))?;
    ensure!(named.next().is_none(), "more than one {name}");
    Ok(span)
}

const ADD_POD: &str = "inpod.podevents.v1.PodEventsService/AddPod";

/// An ADD's spans, each with parent and process.
const TREE: [(&str, &str, &str); 9] = [
    (ADD_POD, "", "pod-events"),
    ("decide", ADD_POD, "pod-events"),
    ("claim", ADD_POD, "pod-events"),
    ("hand-over", ADD_POD, "pod-events"),
    ("rules", ADD_POD, "pod-events"),
    (
        "inpod.netconfig.v1.NetconfigService/ClaimNetns",
        "claim",
        "netconfig",
    ),
    (
        "inpod.ztunnelbroker.v1.ZtunnelBrokerService/AddWorkload",
        "hand-over",
        "ztunnel-broker",
    ),
    (
        "inpod.netconfig.v1.NetconfigService/ApplyRules",
        "rules",
        "netconfig",
    ),
    // One of several is checked.
    ("queue", ADD_POD, "pod-events"),
];

#[test]
fn one_add_is_one_tree_of_spans_over_all_processes() {
    let bench = Bench::new();
    let collector = Collector::start(&bench.socket());
    bench.start();
    let trace = add(&bench.node, "a");
    let spans = eventually("every span of the ADD is exported", TIMEOUT, || {
        let spans = collector.spans();
        for (name, ..) in TREE {
            ensure!(spans.iter().any(|it| it.span.name == name), "no {name}");
        }
        Ok(spans)
    })
    .unwrap();
    // No other sampled trace exists.
    let traces: BTreeSet<_> = spans.iter().map(Received::trace).collect();
    assert_eq!(traces, BTreeSet::from([trace]));
    let names: BTreeMap<_, _> = spans
        .iter()
        .map(|it| (hex(&it.span.span_id), &*it.span.name))
        .collect();
    assert_eq!(names.len(), spans.len(), "two spans of one id");
    for Received { process, span } in &spans {
        let (name, parent, service) = TREE.iter().find(|(name, ..)| *name == span.name).unwrap();
        assert_eq!(*process, format!("inpod-{service}"), "{name}");
        let actual = names.get(&hex(&span.parent_span_id)).copied();
        // The plugin, which exports nothing, is the root.
        assert_eq!(actual.unwrap_or_default(), *parent, "{name}");
        let kind = if name.contains('/') { SERVER } else { INTERNAL };
        assert_eq!((span.kind, &span.status), (kind, &None), "{name}");
    }
    for (name, parent, _) in TREE
        .iter()
        .filter(|(name, parent, _)| *name != "queue" && !parent.is_empty())
    {
        let (inner, outer) = (one(&spans, name).unwrap(), one(&spans, parent).unwrap());
        assert!(
            outer.span.start_time_unix_nano <= inner.span.start_time_unix_nano,
            "{name}"
        );
    }
    let add = one(&spans, ADD_POD).unwrap();
    let text = |value: &str| Value::Text(value.to_owned());
    assert_eq!(add.said("k8s.pod.name"), Some(&text("a")));
    assert_eq!(add.said("k8s.namespace.name"), Some(&text("shop")));
    assert_eq!(add.said("rpc.grpc.status_code"), Some(&Value::Whole(0)));
    for service in SERVICES {
        assert!(bench.counted(service, "exported") > 0.5, "{service}");
    }
}

#[test]
fn an_add_that_fails_is_an_error_with_its_code_and_its_reason() {
    let bench = Bench::new();
    let collector = Collector::start(&bench.socket());
    bench.start();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    bench.node.until_known(&pod.spec).unwrap();
    let add = bench.node.call(Call::add, &pod);
    // The node's own netns belongs to no pod.
    let add = add.with_var("CNI_NETNS", "/proc/1/ns/net");
    let outcome = add.timeout_seconds(ADD).run().unwrap();
    assert_ne!(outcome.code, 0, "{outcome:?}");
    eventually("the failure is exported", TIMEOUT, || {
        let spans = collector.spans();
        let add = one(&spans, ADD_POD)?;
        let status = add.span.status.clone().context("no status")?;
        ensure!(
            status.code == ERROR && !status.message.is_empty(),
            "{status:?}"
        );
        let Some(Value::Whole(code)) = add.said("rpc.grpc.status_code") else {
            anyhow::bail!("no code in {add:?}");
        };
        ensure!(*code > 0, "{code}");
        let Some(Value::Text(reason)) = add.said("inpod.reason") else {
            anyhow::bail!("no reason in {add:?}");
        };
        ensure!(
            outcome.stdout.contains(&**reason),
            "{reason} is not in {outcome:?}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_is_not_sampled_is_not_exported() {
    let bench = Bench::new();
    let collector = Collector::start(&bench.socket());
    bench.start_one("netconfig");
    eventually("netconfig answers", TIMEOUT, || bench.node.api().claims()).unwrap();
    bench.calls(3, "00");
    bench.calls(1, "01");
    let spans = eventually("a span is exported", TIMEOUT, || {
        Some(collector.spans())
            .filter(|spans| !spans.is_empty())
            .context("none")
    })
    .unwrap();
    // The last, since the queue keeps the order.
    let traces: Vec<_> = spans.iter().map(Received::trace).collect();
    assert_eq!(traces, [format!("{:032x}", 1)]);
}

#[test]
fn a_collector_that_hangs_holds_up_no_call_and_what_is_too_much_is_counted() {
    let bench = Bench::new();
    let collector = Collector::hanging(&bench.socket());
    bench.start();
    add(&bench.node, "a");
    eventually("an export hangs", TIMEOUT, || {
        ensure!(!collector.spans().is_empty(), "none has come");
        Ok(())
    })
    .unwrap();
    // The caller's limit is shorter than the export's: an ADD that waited would fail.
    assert!(Duration::from_secs(ADD) < EXPORT);
    add(&bench.node, "b");
    for service in SERVICES {
        bench.until_counted(service, "failed");
    }
    bench.calls(FLOOD, "01");
    assert!(bench.counted("netconfig", "dropped") > 0.5);
    add(&bench.node, "c");
    for service in SERVICES {
        assert!(bench.counted(service, "exported") < 0.5, "{service}");
        assert_eq!(bench.logged(service, "Cannot export spans"), 1, "{service}");
        bench.node.stop(service, Signal::SIGTERM).unwrap();
    }
}

#[test]
fn a_collector_that_is_away_is_reported_once_and_found_again_when_it_is_back() {
    let bench = Bench::new();
    bench.start();
    add(&bench.node, "a");
    for service in SERVICES {
        bench.until_counted(service, "failed");
    }
    let failed = bench.counted("netconfig", "failed");
    bench.calls(1, "01");
    eventually("another batch fails", TIMEOUT, || {
        ensure!(
            bench.counted("netconfig", "failed") > failed + 0.5,
            "none has"
        );
        Ok(())
    })
    .unwrap();
    assert_eq!(bench.logged("netconfig", "Cannot export spans"), 1);
    let collector = Collector::start(&bench.socket());
    let trace = add(&bench.node, "b");
    eventually("spans are exported again", TIMEOUT, || {
        let spans = collector.spans();
        let here = spans.iter().filter(|it| it.trace() == trace);
        let processes: BTreeSet<_> = here.map(|it| &*it.process).collect();
        ensure!(processes.len() == SERVICES.len(), "only of {processes:?}");
        Ok(())
    })
    .unwrap();
    for service in SERVICES {
        let reported = format!("{service} says so");
        eventually(&reported, TIMEOUT, || {
            let count = bench.logged(service, "Spans are exported again");
            ensure!(count == 1, "{count} times");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_last_spans_are_exported_before_a_process_ends() {
    let bench = Bench::new();
    let collector = Collector::start(&bench.socket());
    bench.start_one("netconfig");
    eventually("netconfig answers", TIMEOUT, || bench.node.api().claims()).unwrap();
    bench.calls(600, "01");
    bench.node.stop("netconfig", Signal::SIGTERM).unwrap();
    assert_eq!(collector.spans().len(), 600);
}
