//! Bounds what one response of the API server occupies in memory. kube collects a list, and each line of a watch,
//! without a limit.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::{TryFutureExt as _, future::MapOk};
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use kube::client::Body as RequestBody;
use tonic::codegen::Bytes;
use tower::{BoxError, Service};

/// The limit of a page of a list, and of an event of a watch. etcd stores objects of up to 1.5 MiB, which may take up to
/// six times as many bytes in JSON, where control characters are escaped.
pub(super) const MAX_BYTES: usize = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ResponseTooLarge {
    #[error("an event of a watch has more than {MAX_BYTES} bytes")]
    Event,
    #[error("a response has more than {MAX_BYTES} bytes")]
    Response,
}

/// Returns whether a cause of the error is the limit of responses.
pub(super) fn is_too_large(error: &kube::Error) -> bool {
    let error: &dyn std::error::Error = error;
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| cause.is::<ResponseTooLarge>())
}

/// Wraps a client, and fails the body of a response that is too large.
#[derive(Clone, Debug)]
pub(super) struct LimitResponses<S>(pub(super) S);

impl<S, B> Service<Request<RequestBody>> for LimitResponses<S>
where
    S: Service<Request<RequestBody>, Response = Response<B>>,
{
    type Response = Response<LimitedBody<B>>;
    type Error = S::Error;
    type Future = MapOk<S::Future, Box<dyn FnOnce(Response<B>) -> Self::Response + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let limited = if is_watch(request.uri().query().unwrap_or_default()) {
            ResponseTooLarge::Event
        } else {
            ResponseTooLarge::Response
        };
        let limit = move |body| LimitedBody {
            body,
            limited,
            bytes: 0,
        };
        self.0
            .call(request)
            .map_ok(Box::new(move |response| response.map(limit)))
    }
}

fn is_watch(query: &str) -> bool {
    query.split('&').any(|parameter| parameter == "watch=true")
}

#[derive(Debug)]
pub(super) struct LimitedBody<B> {
    body: B,
    limited: ResponseTooLarge,
    /// The received bytes of the response, or of the current event.
    bytes: usize,
}

impl<B> LimitedBody<B> {
    fn count(&mut self, data: &[u8]) -> Result<(), ResponseTooLarge> {
        let last_line_end = match self.limited {
            ResponseTooLarge::Event => data.iter().rposition(|byte| *byte == b'\n'),
            ResponseTooLarge::Response => None,
        };
        self.bytes = match last_line_end {
            Some(at) => data.len() - at - 1,
            None => self.bytes.saturating_add(data.len()),
        };
        if self.bytes > MAX_BYTES {
            return Err(self.limited);
        }
        Ok(())
    }
}

impl<B> Body for LimitedBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            if let Some(data) = frame.data_ref() {
                self.count(data)?;
            }
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
