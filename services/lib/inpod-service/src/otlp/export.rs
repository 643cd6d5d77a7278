//! Sends spans to the collector, with a bounded queue that drops spans when full, and one task that sends batches.
//!
//! A batch is sent once, within [`SEND_TIMEOUT`]. If sending fails, the spans of the batch are counted and dropped.

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

/// The maximum number of waiting spans; further spans are dropped.
const QUEUE_CAPACITY: usize = 2048;

const MAX_BATCH: usize = 512;

/// The longest time that a span waits for its batch.
const LINGER: Duration = Duration::from_secs(1);

const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for sending the remaining spans when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

type ByResult = [(&'static str, &'static str); 1];

#[derive(Clone, Debug, Default)]
struct Counts(Family<ByResult, Counter>);

impl Counts {
    fn add(&self, result: &'static str, count: u64) {
        if count > 0 {
            self.0.get_or_create(&[("result", result)]).inc_by(count);
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<wire::Span>,
    counts: Counts,
}

impl Queue {
    /// Queues a span, or drops the span if the queue is full.
    pub(super) fn push(&self, span: wire::Span) {
        if self.spans.try_send(span).is_err() {
            self.counts.add("dropped", 1);
        }
    }
}

/// Creates a queue and returns both of its ends.
pub(super) fn queue(capacity: usize) -> (Queue, mpsc::Receiver<wire::Span>) {
    let (spans, waiting) = mpsc::channel(capacity);
    let counts = Counts::default();
    (Queue { spans, counts }, waiting)
}

#[derive(Debug)]
pub(crate) struct ExporterBuilder(Option<PendingExporter>);

#[derive(Debug)]
struct PendingExporter {
    settings: Settings,
    queue: Queue,
    spans: mpsc::Receiver<wire::Span>,
}

impl ExporterBuilder {
    pub(crate) fn new(settings: Settings) -> Self {
        if settings.otlp_endpoint == Endpoint::Disabled {
            return Self(None);
        }
        let (queue, spans) = queue(QUEUE_CAPACITY);
        Self(Some(PendingExporter {
            settings,
            queue,
            spans,
        }))
    }

    /// Returns `None` if no endpoint is configured.
    pub(crate) fn layer(&self) -> Option<Layer> {
        let pending = self.0.as_ref()?;
        Some(Layer(pending.queue.clone()))
    }

    pub(crate) fn export(
        self,
        service: &Service,
        instance_id: &str,
        metrics: &Metrics,
    ) -> Exporter {
        let begin = |pending: PendingExporter| {
            let Settings {
                otlp_endpoint: endpoint,
                node_name,
            } = pending.settings;
            let channel = endpoint.channel()?;
            let counts = pending.queue.counts;
            metrics.register(|registry| {
                let help = "Spans by result: exported; dropped, because the queue was full; failed, because the collector was unreachable or too slow; rejected by the collector";
                registry.register("otlp_spans", help, counts.0.clone());
            });
            let (stop, stopped) = oneshot::channel();
            let sender = Sender {
                resource: resource(service, instance_id, node_name.as_deref()),
                scope: wire::Scope {
                    name: "inpod".to_owned(),
                    version: service.version.to_owned(),
                },
                client: Grpc::new(channel),
                endpoint,
                waiting: SpanReceiver {
                    spans: pending.spans,
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

#[derive(Debug)]
pub(crate) struct Exporter(Option<Sending>);

#[derive(Debug)]
struct Sending {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Exporter {
    /// Sends the remaining spans, within [`FLUSH_TIMEOUT`].
    pub(crate) async fn flush(self) {
        let Some(Sending { stop, task }) = self.0 else {
            return;
        };
        drop(stop);
        if timeout(FLUSH_TIMEOUT, task).await.is_err() {
            tracing::warn!("The remaining spans were not exported");
        }
    }
}

/// Identifies this process to the collector by service, version, instance, host and node.
fn resource(service: &Service, instance_id: &str, node_name: Option<&str>) -> wire::Resource {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host.as_deref().map(str::trim);
    let name = format!("inpod-{}", service.name);
    let attributes = [
        ("service.name", Some(&*name)),
        ("service.version", Some(service.version)),
        ("service.instance.id", Some(instance_id)),
        ("host.name", host),
        ("k8s.node.name", node_name),
    ];
    let attributes = attributes.into_iter().filter_map(|(key, value)| {
        let value = value.filter(|value| !value.is_empty())?;
        Some(KeyValue::new(key, Value::Text(value.to_owned())))
    });
    wire::Resource {
        attributes: attributes.collect(),
    }
}

#[derive(Debug)]
struct SpanReceiver {
    spans: mpsc::Receiver<wire::Span>,
    /// The signal to stop, `None` once no span will follow.
    stop: Option<oneshot::Receiver<()>>,
}

impl SpanReceiver {
    /// Returns the next span, or `None` after the last span.
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

    /// Waits for a full batch or for [`LINGER`], and returns `None` after the last span.
    async fn batch(&mut self) -> Option<Vec<wire::Span>> {
        let mut batch = vec![self.next().await?];
        let until = Instant::now() + LINGER;
        while batch.len() < MAX_BATCH {
            match timeout_at(until, self.next()).await {
                Ok(Some(span)) => batch.push(span),
                Ok(None) | Err(_) => break,
            }
        }
        Some(batch)
    }
}

#[derive(Debug)]
struct Sender {
    waiting: SpanReceiver,
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
            match timeout(SEND_TIMEOUT, self.send(spans)).await {
                Ok(Ok(rejected)) => {
                    let rejected = rejected.min(count);
                    self.counts.add("rejected", rejected);
                    self.counts.add("exported", count - rejected);
                    self.report_success();
                }
                Ok(Err(status)) => {
                    self.report_failure(count, &format!("{:#}", anyhow::Error::from(status)));
                }
                Err(_elapsed) => {
                    self.report_failure(count, &format!("no response within {SEND_TIMEOUT:?}"));
                }
            }
        }
    }

    /// Sends a batch and returns the number of spans that the collector rejected.
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
        request.set_timeout(SEND_TIMEOUT);
        let away = |error| Status::from_error(Box::new(error));
        self.client.ready().await.map_err(away)?;
        let path = PathAndQuery::from_static(wire::EXPORT);
        let codec = ProstCodec::<wire::ExportRequest, wire::ExportResponse>::default();
        let answer = self.client.unary(request, path, codec).await?;
        let partial = answer.into_inner().partial_success.unwrap_or_default();
        Ok(u64::try_from(partial.rejected_spans).unwrap_or_default())
    }

    fn report_success(&mut self) {
        if std::mem::take(&mut self.is_away) {
            tracing::info!("Spans are exported again");
        }
    }

    fn report_failure(&mut self, count: u64, error: &str) {
        self.counts.add("failed", count);
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(error, "Cannot export spans");
        }
        // A new channel is needed, because the connection to a silent host would be kept for minutes.
        if let Some(channel) = self.endpoint.channel() {
            self.client = Grpc::new(channel);
        }
    }
}

#[cfg(test)]
mod tests;
