//! Makes one gRPC call over an HTTP/2 connection, on top of the `h2` crate.
//!
//! tonic's `Channel` is made for processes with many calls: hyper, and tower's buffer with a worker, would cost more
//! here than the call. With `h2`, preface, settings, headers and message leave in one write, without awaiting the
//! server's settings (RFC 9113, section 3.4). Messages, metadata and statuses remain tonic's.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    path::Path,
    pin::Pin,
};

use h2::client::SendRequest;
use http_body_util::{BodyExt as _, Full, combinators::WithTrailers};
use tokio::{io::BufWriter, net::UnixStream};
use tonic::{
    body::Body,
    client::GrpcService,
    codegen::{
        Bytes, Context, Poll, StdError,
        http::{HeaderMap, Request, Response},
    },
};

/// Carries tonic's requests and responses over an `h2` connection.
pub(crate) struct Transport(SendRequest<Bytes>);

impl Transport {
    /// Never waits, because a Unix socket accepts or refuses at once and nothing is sent before the request.
    pub(crate) async fn connect(socket: &Path) -> Result<Self, StdError> {
        // The buffer holds the preface back until the request is written, so that both leave together.
        let stream = BufWriter::new(UnixStream::connect(socket).await?);
        let (sender, connection) = h2::client::handshake(stream).await?;
        // If the connection task ends, the call fails with the error of the connection.
        tokio::spawn(connection);
        Ok(Self(sender))
    }
}

impl GrpcService<Body> for Transport {
    type ResponseBody = WithTrailers<Full<Bytes>, Ready<Option<Result<HeaderMap, Infallible>>>>;
    type Error = StdError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Self::ResponseBody>, StdError>>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut sender = self.0.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let message = body.collect().await?.to_bytes();
            let (answer, mut stream) = sender.send_request(Request::from_parts(head, ()), false)?;
            stream.send_data(message, true)?;
            let (head, mut body) = answer.await?.into_parts();
            let mut message = Vec::new();
            while let Some(chunk) = body.data().await.transpose()? {
                body.flow_control().release_capacity(chunk.len())?;
                message.extend(chunk);
            }
            let trailers = body.trailers().await?.map(Ok);
            let body = Full::from(message).with_trailers(ready(trailers));
            Ok(Response::from_parts(head, body))
        })
    }
}
