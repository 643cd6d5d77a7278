//! An OpenTelemetry collector that keeps OTLP spans, or hangs.

use std::{
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use inpod_service::otlp::wire::{self, ExportRequest, ExportResponse, Value};
use tokio::{net::UnixListener, runtime::Runtime};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, body::Body, server::NamedService};
use tonic_prost::ProstCodec;
use tower::Service;

#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// `service.name` of its process.
    pub(crate) process: String,
    pub(crate) span: wire::Span,
}

impl Received {
    pub(crate) fn trace(&self) -> String {
        hex(&self.span.trace_id)
    }

    pub(crate) fn said(&self, key: &str) -> Option<&Value> {
        said(&self.span.attributes, key)
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn said<'a>(attributes: &'a [wire::KeyValue], key: &str) -> Option<&'a Value> {
    let said = attributes.iter().find(|said| said.key == key)?;
    said.value.as_ref()?.value.as_ref()
}

pub(crate) struct Collector {
    socket: PathBuf,
    spans: Arc<Mutex<Vec<Received>>>,
    _runtime: Runtime,
}

#[derive(Clone)]
struct Taker {
    spans: Arc<Mutex<Vec<Received>>>,
    hangs: bool,
}

impl Collector {
    pub(crate) fn start(socket: &Path) -> Self {
        Self::serve(socket, false)
    }

    /// Accepts connections and calls, keeps spans, never answers.
    pub(crate) fn hanging(socket: &Path) -> Self {
        Self::serve(socket, true)
    }

    fn serve(socket: &Path, hangs: bool) -> Self {
        let spans: Arc<Mutex<Vec<Received>>> = Arc::default();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let incoming = {
            let _context = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).unwrap())
        };
        let taker = Taker {
            spans: Arc::clone(&spans),
            hangs,
        };
        let server = tonic::transport::Server::builder().add_service(taker);
        runtime.spawn(server.serve_with_incoming(incoming));
        Self {
            socket: socket.to_owned(),
            spans,
            _runtime: runtime,
        }
    }

    pub(crate) fn spans(&self) -> Vec<Received> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        fs::remove_file(&self.socket).unwrap_or_default();
    }
}

impl Taker {
    async fn take(
        self,
        request: Request<ExportRequest>,
    ) -> Result<Response<ExportResponse>, Status> {
        for of_process in request.into_inner().resource_spans {
            let resource = of_process.resource.unwrap_or_default();
            let name = said(&resource.attributes, "service.name");
            let Some(Value::Text(process)) = name else {
                return Err(Status::invalid_argument(format!(
                    "{resource:?} has no name"
                )));
            };
            let spans = of_process.scope_spans.into_iter();
            let spans = spans.flat_map(|of_scope| of_scope.spans);
            let received = spans.map(|span| Received {
                process: process.clone(),
                span,
            });
            let mut all = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(received);
        }
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(ExportResponse::default()))
    }
}

impl NamedService for Taker {
    const NAME: &'static str = "opentelemetry.proto.collector.trace.v1.TraceService";
}

impl Service<http::Request<Body>> for Taker {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            if !request.uri().path().ends_with("/Export") {
                return Ok(Status::unimplemented("there is Export").into_http());
            }
            let codec = ProstCodec::<ExportResponse, ExportRequest>::default();
            let take = tower::service_fn(move |request| this.clone().take(request));
            Ok(tonic::server::Grpc::new(codec).unary(take, request).await)
        })
    }
}
