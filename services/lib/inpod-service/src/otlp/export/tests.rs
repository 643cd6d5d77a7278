//! Exports spans to a fake collector on a real socket.

use std::{convert::Infallible, path::Path, pin::Pin, task};

use tokio::{
    net::{TcpListener, UnixListener},
    time::sleep,
};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::{Response, body::Body, server::NamedService, transport::server::Router};

use super::*;
use crate::Readiness;

const NAME: &str = "opentelemetry.proto.collector.trace.v1.TraceService";

#[derive(Clone, Copy)]
enum Manner {
    Takes,
    /// Rejects the given number of spans in each batch.
    Rejects(i64),
    Refuses,
    Hangs,
}

#[derive(Clone)]
struct Collector {
    manner: Manner,
    sent: mpsc::UnboundedSender<wire::ExportRequest>,
}

impl Collector {
    fn start(socket: &Path, manner: Manner) -> mpsc::UnboundedReceiver<wire::ExportRequest> {
        let (server, received) = Self::server(manner);
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        tokio::spawn(server.serve_with_incoming(incoming));
        received
    }

    fn server(manner: Manner) -> (Router, mpsc::UnboundedReceiver<wire::ExportRequest>) {
        let (sent, received) = mpsc::unbounded_channel();
        let server = tonic::transport::Server::builder().add_service(Self { manner, sent });
        (server, received)
    }

    async fn take(
        self,
        request: Request<wire::ExportRequest>,
    ) -> Result<Response<wire::ExportResponse>, Status> {
        self.sent.send(request.into_inner()).unwrap();
        let partial_success = match self.manner {
            Manner::Takes => None,
            Manner::Rejects(rejected_spans) => Some(wire::PartialSuccess {
                rejected_spans,
                error_message: "no capacity".to_owned(),
            }),
            Manner::Refuses => return Err(Status::resource_exhausted("no capacity")),
            Manner::Hangs => std::future::pending().await,
        };
        Ok(Response::new(wire::ExportResponse { partial_success }))
    }
}

impl NamedService for Collector {
    const NAME: &'static str = NAME;
}

impl tower::Service<http::Request<Body>> for Collector {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            assert_eq!(request.uri().path(), wire::EXPORT);
            let codec = ProstCodec::<wire::ExportResponse, wire::ExportRequest>::default();
            let take = tower::service_fn(move |request| this.clone().take(request));
            Ok(tonic::server::Grpc::new(codec).unary(take, request).await)
        })
    }
}

struct Process {
    dir: tempfile::TempDir,
    metrics: Metrics,
    queue: Queue,
    exporter: Exporter,
}

impl Process {
    fn start(dir: tempfile::TempDir) -> Self {
        let endpoint = Endpoint::Unix(dir.path().join("otlp.sock"));
        Self::to(endpoint, dir)
    }

    fn to(otlp_endpoint: Endpoint, dir: tempfile::TempDir) -> Self {
        let service = Service {
            name: "netconfig",
            about: "",
            version: "1.2.3",
            keys: &[],
        };
        let metrics = Metrics::new(&service, &Readiness::default());
        let spans = ExporterBuilder::new(Settings {
            otlp_endpoint,
            node_name: Some("node-1".to_owned()),
        });
        let queue = spans.layer().unwrap().0;
        let exporter = spans.export(&service, "run-1", &metrics);
        Self {
            dir,
            metrics,
            queue,
            exporter,
        }
    }

    fn with(manner: Manner) -> (Self, mpsc::UnboundedReceiver<wire::ExportRequest>) {
        let dir = tempfile::tempdir().unwrap();
        let received = Collector::start(&dir.path().join("otlp.sock"), manner);
        (Self::start(dir), received)
    }

    fn push(&self, count: usize) {
        (0..count).for_each(|_| self.queue.push(wire::Span::default()));
    }

    fn count(&self, result: &str) -> u64 {
        let line = format!("inpod_netconfig_otlp_spans_total{{result=\"{result}\"}} ");
        let text = self.metrics.text();
        let rest = text.split_once(&line).map(|(_, rest)| rest);
        let number = rest.and_then(|rest| rest.lines().next());
        number.map_or(0, |number| number.parse().unwrap())
    }

    async fn until(&self, result: &str, count: u64) {
        let counted = async {
            while self.count(result) != count {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let counted = timeout(Duration::from_secs(20), counted).await;
        assert!(
            counted.is_ok(),
            "{result} is not {count}: {}",
            self.metrics.text()
        );
    }
}

fn sizes(received: &mut mpsc::UnboundedReceiver<wire::ExportRequest>) -> Vec<usize> {
    let requests = std::iter::from_fn(|| received.try_recv().ok());
    requests
        .map(|request| request.resource_spans[0].scope_spans[0].spans.len())
        .collect()
}

#[tokio::test]
async fn what_is_left_at_the_end_is_sent_with_the_process_that_it_is_of() {
    let (process, mut received) = Process::with(Manner::Takes);
    process.push(3);
    process.exporter.flush().await;
    let request = received.try_recv().unwrap();
    let [of_process] = &*request.resource_spans else {
        panic!("{request:?}")
    };
    assert_eq!(of_process.scope_spans[0].spans.len(), 3);
    let resource = of_process.resource.as_ref().unwrap();
    for (key, value) in [
        ("service.name", "inpod-netconfig"),
        ("service.version", "1.2.3"),
        ("service.instance.id", "run-1"),
        ("k8s.node.name", "node-1"),
    ] {
        let attribute = KeyValue::new(key, Value::Text(value.to_owned()));
        assert!(
            resource.attributes.contains(&attribute),
            "{key} is not in {resource:?}"
        );
    }
    assert!(
        resource
            .attributes
            .iter()
            .any(|attribute| attribute.key == "host.name")
    );
}

#[tokio::test]
async fn a_collector_on_a_port_is_reached_as_one_on_a_socket_is() {
    let (server, mut received) = Collector::server(Manner::Takes);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let process = Process::to(endpoint.parse().unwrap(), tempfile::tempdir().unwrap());
    process.push(2);
    process.until("exported", 2).await;
    assert_eq!(sizes(&mut received), [2]);
}

#[tokio::test]
async fn no_batch_has_more_than_512_spans_and_all_are_counted() {
    let (process, mut received) = Process::with(Manner::Takes);
    process.push(1200);
    process.until("exported", 1200).await;
    assert_eq!(sizes(&mut received), [512, 512, 176]);
}

#[tokio::test(start_paused = true)]
async fn a_span_waits_for_others_for_a_second_and_no_longer() {
    let (queue, spans) = queue(8);
    let (_stop, stopped) = oneshot::channel();
    let mut waiting = SpanReceiver {
        spans,
        stop: Some(stopped),
    };
    let began = Instant::now();
    queue.push(wire::Span::default());
    let later = queue.clone();
    tokio::spawn(async move {
        sleep(LINGER / 2).await;
        later.push(wire::Span::default());
        sleep(LINGER).await;
        later.push(wire::Span::default());
    });
    assert_eq!(waiting.batch().await.unwrap().len(), 2);
    assert_eq!(began.elapsed(), LINGER);
    assert_eq!(waiting.batch().await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_the_end_nothing_is_waited_for_and_nothing_more_is_taken() {
    let (queue, spans) = queue(8);
    let (stop, stopped) = oneshot::channel();
    let mut waiting = SpanReceiver {
        spans,
        stop: Some(stopped),
    };
    queue.push(wire::Span::default());
    queue.push(wire::Span::default());
    drop(stop);
    let began = Instant::now();
    let mut left = 0;
    while let Some(batch) = waiting.batch().await {
        left += batch.len();
    }
    assert_eq!((left, began.elapsed()), (2, Duration::ZERO));
    queue.push(wire::Span::default());
    let dropped = queue.counts.0.get_or_create(&[("result", "dropped")]);
    assert_eq!(dropped.get(), 1);
}

#[tokio::test]
async fn what_is_too_much_is_dropped_at_once_and_counted() {
    let (process, _received) = Process::with(Manner::Hangs);
    // With one thread, no span leaves the queue before the next await.
    process.push(QUEUE_CAPACITY + 7);
    assert_eq!(process.count("dropped"), 7);
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_hangs_costs_a_batch_its_deadline_and_the_end_a_bound() {
    let (process, mut received) = Process::with(Manner::Hangs);
    process.push(4);
    received.recv().await.unwrap();
    let sent = Instant::now();
    process.until("failed", 4).await;
    assert!(
        sent.elapsed() <= SEND_TIMEOUT + Duration::from_millis(50),
        "{:?}",
        sent.elapsed()
    );
    process.push(1);
    let began = Instant::now();
    process.exporter.flush().await;
    assert!(
        began.elapsed() <= FLUSH_TIMEOUT + Duration::from_millis(5),
        "{:?}",
        began.elapsed()
    );
    const { assert!(FLUSH_TIMEOUT.as_millis() < SEND_TIMEOUT.as_millis()) };
}

#[tokio::test]
async fn a_collector_that_is_away_costs_spans_and_is_found_when_it_is_there() {
    let process = Process::start(tempfile::tempdir().unwrap());
    process.push(2);
    process.until("failed", 2).await;
    let mut received = Collector::start(&process.dir.path().join("otlp.sock"), Manner::Takes);
    process.push(1);
    process.until("exported", 1).await;
    assert_eq!(
        (process.count("failed"), sizes(&mut received)),
        (2, vec![1])
    );
}

#[tokio::test]
async fn what_the_collector_does_not_take_is_counted_and_not_sent_again() {
    let (process, mut received) = Process::with(Manner::Rejects(2));
    process.push(5);
    process.until("rejected", 2).await;
    assert_eq!(process.count("exported"), 3);
    assert_eq!(sizes(&mut received), [5]);
    let (process, mut received) = Process::with(Manner::Refuses);
    process.push(5);
    process.until("failed", 5).await;
    process.exporter.flush().await;
    assert_eq!(sizes(&mut received), [5]);
}
