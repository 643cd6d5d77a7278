//! A small HTTP server on a TCP port, for clients that cannot use the gRPC socket, namely Prometheus and the kubelet.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::libc;
use tokio::{
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::{sleep, timeout},
};

use crate::Readiness;

/// The maximum, at which a further connection closes the oldest, so that idle clients cannot keep a probe waiting.
const MAX_CONNECTIONS: usize = 16;

/// The time in which a client has to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum lifetime of a connection, which carries one request and its response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The smallest buffer for a request that hyper allows.
const MAX_HEADER_BYTES: usize = 8192;

const BIND_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A TCP port and the condition that reports its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    /// The served content, named in messages.
    pub(crate) content: &'static str,
    /// The name of a condition, not met while the port cannot be bound.
    pub(crate) condition: &'static str,
    pub(crate) remedy: &'static str,
}

/// Answers the GET requests of an endpoint.
pub(crate) trait Handler: Clone + Send + Sync + 'static {
    /// Returns `None` if the handler serves nothing at this path.
    fn get(&self, path: &str) -> impl Future<Output = Option<Response<Full<Bytes>>>> + Send;
}

impl Endpoint {
    /// Serves forever. If the port cannot be bound, the condition reports the error and the bind is retried, because a
    /// taken port must not keep pods from starting.
    pub(crate) async fn serve(self, readiness: &Readiness, handler: impl Handler) -> Infallible {
        let listener = self.listen(readiness).await;
        let Self {
            address, content, ..
        } = self;
        tracing::info!(%address, content, "Serving HTTP");
        let mut connections: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    connections.retain(|connection| !connection.is_finished());
                    if connections.len() >= MAX_CONNECTIONS
                        && let Some(oldest) = connections.pop_front()
                    {
                        oldest.abort();
                    }
                    let answer = timeout(CONNECTION_TIMEOUT, answer(stream, handler.clone()));
                    connections.push_back(tokio::spawn(answer).abort_handle());
                }
                Err(error) => {
                    tracing::error!(%error, content, "Cannot accept a connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn listen(self, readiness: &Readiness) -> TcpListener {
        let Self {
            address,
            content,
            condition,
            remedy,
        } = self;
        let mut logged = false;
        loop {
            match bind(address).await {
                Ok(listener) => {
                    readiness.set(condition, Ok(()));
                    return listener;
                }
                Err(error) => {
                    let message = format!("cannot serve {content} on {address}: {error}; {remedy}");
                    if !std::mem::replace(&mut logged, true) {
                        tracing::error!(error = message, "Cannot serve HTTP; retrying");
                    }
                    readiness.set(condition, Err(message));
                    sleep(BIND_RETRY_INTERVAL).await;
                }
            }
        }
    }
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let error = match TcpListener::bind(address).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    match without_ipv6(address, &error) {
        Some(address) => TcpListener::bind(address).await,
        None => Err(error),
    }
}

/// Returns the IPv4 equivalent of `[::]`, which serves both families, for a kernel without IPv6 (`ipv6.disable=1`).
fn without_ipv6(address: SocketAddr, error: &io::Error) -> Option<SocketAddr> {
    let is_any = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let is_unsupported = error.raw_os_error() == Some(libc::EAFNOSUPPORT);
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
    (is_any && is_unsupported).then_some(any)
}

async fn answer(stream: TcpStream, handler: impl Handler) -> Result<(), hyper::Error> {
    let service = service_fn(move |request: Request<Incoming>| {
        let handler = handler.clone();
        async move { Ok::<_, Infallible>(respond(&request, &handler).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn respond(request: &Request<Incoming>, handler: &impl Handler) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        return response(StatusCode::METHOD_NOT_ALLOWED, "text/plain", String::new());
    }
    let answer = handler.get(request.uri().path()).await;
    answer.unwrap_or_else(|| response(StatusCode::NOT_FOUND, "text/plain", String::new()))
}

pub(crate) fn response(
    status: StatusCode,
    media_type: &'static str,
    body: String,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let media_type = HeaderValue::from_static(media_type);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, media_type);
    response
}

#[cfg(test)]
pub(crate) mod tests;
