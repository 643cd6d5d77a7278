//! Spans on their way to the collector: a queue that drops what is too much, and one task that sends what it holds.
//!
//! A batch is sent once, within [`DEADLINE`]. A collector that is away, hangs or refuses costs spans, which are counted,
//! and nothing else.

use std::{fs, time::Duration};

use http::uri::PathAndQuery;
use prometheus_client::metrics::{counter::Counter, family::Family};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, timeout, timeout_at},
};
use tonic::{Request, Status, client::Grpc, transport::Channel};
use tonic_prost::ProstCodec;

use super::{
    Settings,
    endpoint::Endpoint,
    layer::Layer,
    wire::{self, KeyValue, Value},
};
use crate::{Metrics, Service};

/// As many spans wait; further ones are dropped.
const QUEUE: usize = 2048;

/// As many are sent at once at the most.
const BATCH: usize = 512;

/// How long a span waits for others to be sent with.
const LINGER: Duration = Duration::from_secs(1);

/// How long the collector may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// How long the process waits at its end for what is left to be sent.
const FLUSH: Duration = Duration::from_secs(2);

type ByResult = [(&'static str, &'static str); 1];

/// What became of spans.
#[derive(Clone, Debug, Default)]
struct Counts(Family<ByResult, Counter>);

impl Counts {
    fn add(&self, result: &'static str, count: u64) {
        if count > 0 {
            self.0.get_or_create(&[("result", result)]).inc_by(count);
        }
    }
}

/// Where ended spans are put.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<wire::Span>,
    counts: Counts,
}

impl Queue {
    /// Takes a span if there is room.
    pub(super) fn push(&self, span: wire::Span) {
        if self.spans.try_send(span).is_err() {
            self.counts.add("dropped", 1);
        }
    }
}

/// A queue with room for some spans, and its other end.
pub(super) fn queue(room: usize) -> (Queue, mpsc::Receiver<wire::Span>) {
    let (spans, waiting) = mpsc::channel(room);
    let counts = Counts::default();
    (Queue { spans, counts }, waiting)
}

/// Spans that are going to be exported.
#[derive(Debug)]
pub(crate) struct Spans(Option<Outset>);

#[derive(Debug)]
struct Outset {
    endpoint: Endpoint,
    node_name: Option<String>,
    queue: Queue,
    spans: mpsc::Receiver<wire::Span>,
}

impl Spans {
    /// What the settings ask for.
    pub(crate) fn new(settings: Settings) -> Self {
        let Settings {
            otlp_endpoint: endpoint,
            node_name,
        } = settings;
        if endpoint == Endpoint::Nowhere {
            return Self(None);
        }
        let (queue, spans) = queue(QUEUE);
        Self(Some(Outset {
            endpoint,
            node_name,
            queue,
            spans,
        }))
    }

    /// What listens to `tracing`, if there is somewhere to export to.
    pub(crate) fn layer(&self) -> Option<Layer> {
        let outset = self.0.as_ref()?;
        Some(Layer(outset.queue.clone()))
    }

    /// Begins to send.
    pub(crate) fn export(
        self,
        service: &Service,
        instance_id: &str,
        metrics: &Metrics,
    ) -> Exporter {
        let begin = |outset: Outset| {
            let channel = outset.endpoint.channel()?;
            let counts = outset.queue.counts;
            metrics.register(|registry| {
                let help = "Spans by what became of them: exported; dropped, being too many; failed, with the collector away or not answering in time; rejected by it";
                registry.register("otlp_spans", help, counts.0.clone());
            });
            let (stop, stopped) = oneshot::channel();
            let sender = Sender {
                resource: resource(service, instance_id, outset.node_name.as_deref()),
                scope: scope(service),
                client: Grpc::new(channel),
                endpoint: outset.endpoint,
                waiting: Waiting {
                    spans: outset.spans,
                    stop: Some(stopped),
                },
                counts,
                is_away: false,
            };
            let task = tokio::spawn(sender.run());
            Some(Sending { stop, task })
        };
        Exporter(self.0.and_then(begin))
    }
}

/// What sends spans, until it is told that no more will come.
#[derive(Debug)]
pub(crate) struct Exporter(Option<Sending>);

#[derive(Debug)]
struct Sending {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Exporter {
    /// Sends what is left, as far as that can be done at once.
    pub(crate) async fn flush(self) {
        let Some(Sending { stop, task }) = self.0 else {
            return;
        };
        drop(stop);
        if timeout(FLUSH, task).await.is_err() {
            tracing::warn!("The last spans were not exported");
        }
    }
}

/// What the collector is told of the process.
fn resource(service: &Service, instance_id: &str, node_name: Option<&str>) -> wire::Resource {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host.as_deref().map(str::trim);
    let name = format!("inpod-{}", service.name);
    let said = [
        ("service.name", Some(&*name)),
        ("service.version", Some(service.version)),
        ("service.instance.id", Some(instance_id)),
        ("host.name", host),
        ("k8s.node.name", node_name),
    ];
    let said = said.into_iter().filter_map(|(key, value)| {
        let value = value.filter(|value| !value.is_empty())?;
        Some(KeyValue::new(key, Value::Text(value.to_owned())))
    });
    wire::Resource {
        attributes: said.collect(),
    }
}

fn scope(service: &Service) -> wire::Scope {
    wire::Scope {
        name: "inpod".to_owned(),
        version: service.version.to_owned(),
    }
}

/// Spans that wait to be sent.
#[derive(Debug)]
struct Waiting {
    spans: mpsc::Receiver<wire::Span>,
    /// Until no more are to come.
    stop: Option<oneshot::Receiver<()>>,
}

impl Waiting {
    /// The next one; none when no more will come.
    async fn next(&mut self) -> Option<wire::Span> {
        if let Some(stop) = &mut self.stop {
            tokio::select! {
                span = self.spans.recv() => return span,
                _ = stop => {}
            }
            self.stop = None;
            self.spans.close();
        }
        self.spans.recv().await
    }

    /// As many as are sent at once, or as came within a moment; none when no more will come.
    async fn batch(&mut self) -> Option<Vec<wire::Span>> {
        let mut batch = vec![self.next().await?];
        let until = Instant::now() + LINGER;
        while batch.len() < BATCH {
            match timeout_at(until, self.next()).await {
                Ok(Some(span)) => batch.push(span),
                Ok(None) | Err(_) => break,
            }
        }
        Some(batch)
    }
}

/// The one task that sends.
#[derive(Debug)]
struct Sender {
    waiting: Waiting,
    endpoint: Endpoint,
    client: Grpc<Channel>,
    resource: wire::Resource,
    scope: wire::Scope,
    counts: Counts,
    is_away: bool,
}

impl Sender {
    async fn run(mut self) {
        while let Some(spans) = self.waiting.batch().await {
            let count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
            match timeout(DEADLINE, self.send(spans)).await {
                Ok(Ok(rejected)) => {
                    let rejected = rejected.min(count);
                    self.counts.add("rejected", rejected);
                    self.counts.add("exported", count - rejected);
                    self.reached();
                }
                Ok(Err(status)) => {
                    self.missed(count, &format!("{:#}", anyhow::Error::from(status)));
                }
                Err(_elapsed) => self.missed(count, &format!("no answer in {DEADLINE:?}")),
            }
        }
    }

    /// Sends a batch, and tells how many spans of it were not taken.
    async fn send(&mut self, spans: Vec<wire::Span>) -> Result<u64, Status> {
        let request = wire::ExportRequest {
            resource_spans: vec![wire::ResourceSpans {
                resource: Some(self.resource.clone()),
                scope_spans: vec![wire::ScopeSpans {
                    scope: Some(self.scope.clone()),
                    spans,
                }],
            }],
        };
        let mut request = Request::new(request);
        request.set_timeout(DEADLINE);
        let away = |error| Status::from_error(Box::new(error));
        self.client.ready().await.map_err(away)?;
        let path = PathAndQuery::from_static(wire::EXPORT);
        let codec = ProstCodec::<wire::ExportRequest, wire::ExportResponse>::default();
        let answer = self.client.unary(request, path, codec).await?;
        let partial = answer.into_inner().partial_success.unwrap_or_default();
        Ok(u64::try_from(partial.rejected_spans).unwrap_or_default())
    }

    fn reached(&mut self) {
        if std::mem::take(&mut self.is_away) {
            tracing::info!("Spans are exported again");
        }
    }

    fn missed(&mut self, count: u64, error: &str) {
        self.counts.add("failed", count);
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(error, "Spans are not exported");
        }
        // A connection to a host that went silent would be kept for minutes.
        if let Some(channel) = self.endpoint.channel() {
            self.client = Grpc::new(channel);
        }
    }
}

#[cfg(test)]
mod tests;
