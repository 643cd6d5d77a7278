//! Serves the webhook by HTTP/1.1 over TLS, with a limit on every resource (services/docs/facts/istio-sidecar.md, 6.2).

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use inpod_service::Shutdown;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{sleep, timeout, timeout_at},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring},
    server::TlsStream,
};

use crate::{
    certificate::CurrentCertificate,
    config::Config,
    connections::{ConnectionSlot, Connections},
    metrics::Metrics,
    path,
    reload::Current,
    review::{self, Answer, Outcome},
};

/// The largest accepted body: twice the largest request that an API server accepts (3 MiB), because the server adds
/// defaults and managed fields to the pod. A pod that is too large to be injected is refused in a response.
const MAX_BODY_BYTES: usize = 6 * 1024 * 1024;

/// The size above which at most `max_reviews` reviews are in memory, from the body to the response. The reviews of usual
/// pods are smaller, and are not delayed by clients that send large bodies or receive large responses slowly.
const LARGE_BODY_BYTES: usize = 64 * 1024;

/// The time for the rest of a large body once the review has a place in memory, so that a slow client does not keep the
/// place. An API server sends the rest sooner.
const LARGE_BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// At the limit, a new connection closes the longest idle connection.
const MAX_CONNECTIONS: usize = 512;

/// The size of a connection's buffers; the buffers of all [`MAX_CONNECTIONS`] may be full.
const MAX_BUFFER_BYTES: usize = 16 * 1024;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time after which the webhook closes an idle connection. API servers close idle connections after 90 s
/// (client-go's transport); if the webhook closed a connection earlier, a review could be lost.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the webhook serves after SIGTERM, because API servers learn late of a missing endpoint.
const SHUTDOWN_DELAY: Duration = Duration::from_secs(5);

/// The time for pending reviews at shutdown, or on an evicted connection.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The time for the rest of a response on an evicted connection.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(250);

/// The time for a client to receive a response, which occupies memory until then.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Server(Arc<Inner>);

struct Inner {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
    metrics: Metrics,
    reviews: Arc<Semaphore>,
    large_reviews: Arc<Semaphore>,
    connections: Arc<Connections>,
    deadline: Duration,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    let listener = listener
        .with_context(|| format!("cannot listen on {address}; see the setting listen_address"))?;
    tracing::info!(address = %listener.local_addr()?, "Serving reviews");
    Ok(listener)
}

impl Server {
    pub fn new(config: &Config, current: Arc<Current>, metrics: Metrics) -> anyhow::Result<Self> {
        let tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let tls = tls
            .with_safe_default_protocol_versions()?
            .with_no_client_auth();
        let mut tls =
            tls.with_cert_resolver(Arc::<CurrentCertificate>::clone(&current.certificate));
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let connections = Connections::new(MAX_CONNECTIONS, metrics.evictions.clone());
        Ok(Self(Arc::new(Inner {
            acceptor: TlsAcceptor::from(Arc::new(tls)),
            current,
            metrics,
            reviews: Arc::new(Semaphore::new(config.max_reviews.get())),
            large_reviews: Arc::new(Semaphore::new(config.max_reviews.get())),
            connections,
            deadline: config.deadline(),
        })))
    }

    /// Serves reviews until `SHUTDOWN_DELAY` after the shutdown, then waits for the pending reviews.
    pub async fn serve(self, listener: TcpListener, shutdown: Shutdown) {
        let last = shutdown.clone();
        let stop = async move {
            shutdown.requested().await;
            sleep(SHUTDOWN_DELAY).await;
        };
        tokio::pin!(stop);
        loop {
            let accepted = async {
                let accepted = listener.accept().await;
                // One accepted connection waits here for a slot; later connections wait in the accept queue.
                let slot = self.0.connections.acquire().await;
                (accepted, slot)
            };
            let (accepted, slot) = tokio::select! {
                () = &mut stop => break,
                both = accepted => both,
            };
            match accepted {
                Ok((stream, _)) => drop(tokio::spawn(self.clone().serve_connection(
                    stream,
                    slot,
                    last.clone(),
                ))),
                Err(error) => {
                    tracing::error!(%error, "Cannot accept a connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop(listener);
        if timeout(DRAIN_TIMEOUT, self.0.connections.wait_empty())
            .await
            .is_err()
        {
            tracing::warn!("Connections did not close in time");
        }
    }

    async fn serve_connection(
        self,
        stream: TcpStream,
        slot: Arc<ConnectionSlot>,
        shutdown: Shutdown,
    ) {
        // An error of the handshake concerns only the client, and is not logged.
        let Some(stream) = self.handshake(stream, &slot).await else {
            return;
        };
        let served = Arc::clone(&slot);
        let service = service_fn(move |request| {
            let (server, slot) = (self.clone(), Arc::clone(&served));
            let guard = served.start_request();
            async move {
                let response = server.serve_inject(request, slot).await;
                drop(guard);
                Ok::<_, Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_buf_size(MAX_BUFFER_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            done = connection.as_mut() => drop(done),
            () = slot.wait_evicted() => {
                connection.as_mut().graceful_shutdown();
                // An idle connection gets little time, because a half-received request may never be completed.
                let limit = if slot.is_busy() { DRAIN_TIMEOUT } else { FLUSH_TIMEOUT };
                drop(timeout(limit, connection).await);
            }
            () = async { shutdown.requested().await; sleep(SHUTDOWN_DELAY).await } => {
                connection.as_mut().graceful_shutdown();
                drop(connection.await);
            }
        }
    }

    async fn handshake(
        &self,
        stream: TcpStream,
        slot: &ConnectionSlot,
    ) -> Option<TlsStream<TcpStream>> {
        let handshake = timeout(HANDSHAKE_TIMEOUT, self.0.acceptor.accept(stream));
        tokio::select! {
            done = handshake => done.ok()?.ok(),
            () = slot.wait_evicted() => None,
        }
    }

    async fn serve_inject(
        &self,
        request: Request<Incoming>,
        slot: Arc<ConnectionSlot>,
    ) -> Response<Full<Bytes>> {
        let began = Instant::now();
        let (response, outcome) = match self.review(request, began).await {
            Ok((answer, permit)) => {
                log_review(&answer);
                let (sent, receiver) = oneshot::channel();
                tokio::spawn(async move {
                    // The sender is dropped with the body, after the body is sent.
                    if timeout(RESPONSE_TIMEOUT, receiver).await.is_err() {
                        slot.evict();
                    }
                });
                let body = ResponseBody {
                    text: answer.body,
                    _permit: permit,
                    _sent: sent,
                };
                (json(Bytes::from_owner(body)), answer.outcome)
            }
            Err(refused) => {
                let mut response = Response::new(Full::from(refused.why));
                *response.status_mut() = refused.status;
                (response, refused.outcome)
            }
        };
        self.0.metrics.reviewed(outcome, began.elapsed());
        response
    }

    async fn review(
        &self,
        request: Request<Incoming>,
        began: Instant,
    ) -> Result<(Answer, Option<OwnedSemaphorePermit>), Refused> {
        let change = path::change(request.uri().path()).ok_or_else(|| {
            bad_request(
                StatusCode::NOT_FOUND,
                "reviews are served at /inject and /gate",
            )
        })?;
        if request.method() != Method::POST {
            return Err(bad_request(
                StatusCode::METHOD_NOT_ALLOWED,
                "reviews require POST",
            ));
        }
        let limit = self.review_timeout(request.uri().query());
        let until = (began + limit).into();
        let late = |_| overloaded("the deadline has passed");
        let is_json = request
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|it| it == "application/json");
        let body = self.receive_body(request.into_body());
        let (body, large_permit) = timeout_at(until, body).await.map_err(late)??;
        if body.is_empty() {
            return Err(bad_request(StatusCode::BAD_REQUEST, "the body is empty"));
        }
        if !is_json {
            let why = "the content type is not application/json";
            return Err(bad_request(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        let permit = Arc::clone(&self.0.reviews).acquire_owned();
        let permit = timeout_at(until, permit).await.map_err(late)?;
        let injector = self.0.current.injector();
        let injector = injector
            .ok_or_else(|| overloaded("the configuration is not read yet or cannot be used"))?;
        // A large pod takes milliseconds, which would block other connections on this thread.
        let work = tokio::task::spawn_blocking(move || {
            let answer = review::answer(&injector, &change, &body);
            drop(permit);
            (answer, large_permit)
        });
        // The permit stays with the work: the limits on a pod end a review within 0.4 s of CPU time, measured with 256 KiB of YAML.
        work.await.map_err(|error| {
            tracing::error!(%error, "Failed to answer a review");
            Refused {
                status: StatusCode::INTERNAL_SERVER_ERROR,
                why: "the review could not be answered".to_owned(),
                outcome: Outcome::Failed,
            }
        })
    }

    /// Receives a body, and returns it with the permit of a large review. The permit is acquired for received bytes, not
    /// for announced ones: clients that only announce large bodies keep no other review waiting.
    async fn receive_body(
        &self,
        body: Incoming,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), Refused> {
        let (mut body, mut bytes) = (Limited::new(body, MAX_BODY_BYTES), Vec::new());
        receive(&mut body, &mut bytes, LARGE_BODY_BYTES).await?;
        if bytes.len() <= LARGE_BODY_BYTES {
            return Ok((bytes, None));
        }
        // The semaphore is never closed, so the call does not fail.
        let permit = Arc::clone(&self.0.large_reviews).acquire_owned().await.ok();
        let rest = receive(&mut body, &mut bytes, MAX_BODY_BYTES);
        let is_slow = |_| bad_request(StatusCode::REQUEST_TIMEOUT, "the body arrives too slowly");
        timeout(LARGE_BODY_TIMEOUT, rest).await.map_err(is_slow)??;
        Ok((bytes, permit))
    }

    /// Returns the shorter of two timeouts: the timeout in the configuration, and the timeout of the API server
    /// (`?timeout=10s`).
    fn review_timeout(&self, query: Option<&str>) -> Duration {
        let mut parameters = query.unwrap_or_default().split('&');
        let seconds = parameters.find_map(|it| {
            it.strip_prefix("timeout=")?
                .strip_suffix('s')?
                .parse::<u16>()
                .ok()
        });
        seconds.map_or(self.0.deadline, |seconds| {
            self.0.deadline.min(Duration::from_secs(seconds.into()))
        })
    }
}

/// The body of a response, which keeps the permit of a large review until it is sent.
struct ResponseBody {
    text: String,
    _permit: Option<OwnedSemaphorePermit>,
    _sent: oneshot::Sender<()>,
}

impl AsRef<[u8]> for ResponseBody {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// Logs the review with its UID, which leads to the entry in the API server's audit log.
fn log_review(answer: &Answer) {
    let Answer {
        body,
        outcome,
        uid,
        operations,
    } = answer;
    let (outcome, bytes) = (outcome.as_str(), body.len());
    tracing::debug!(uid, outcome, operations, bytes, "Reviewed");
}

struct Refused {
    status: StatusCode,
    why: String,
    outcome: Outcome,
}

fn bad_request(status: StatusCode, why: &str) -> Refused {
    Refused {
        status,
        why: why.to_owned(),
        outcome: Outcome::BadRequest,
    }
}

fn overloaded(why: &str) -> Refused {
    Refused {
        status: StatusCode::SERVICE_UNAVAILABLE,
        why: why.to_owned(),
        outcome: Outcome::Overloaded,
    }
}

/// Appends the body to `bytes` until the body ends or `bytes` exceeds `limit`. Copies the body, because each received
/// chunk keeps a buffer of several kilobytes.
async fn receive(
    body: &mut Limited<Incoming>,
    bytes: &mut Vec<u8>,
    limit: usize,
) -> Result<(), Refused> {
    while bytes.len() <= limit
        && let Some(frame) = body.frame().await
    {
        let frame = frame.map_err(|error| {
            bad_request(
                StatusCode::BAD_REQUEST,
                &format!(
                    "the body cannot be read, or has more than {MAX_BODY_BYTES} bytes: {error}"
                ),
            )
        })?;
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
    }
    Ok(())
}

fn json(body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    let media_type = HeaderValue::from_static("application/json");
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, media_type);
    response
}

#[cfg(test)]
mod tests;
