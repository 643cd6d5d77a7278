use std::{
    pin::Pin,
    task::{Context, Poll},
};

use http::HeaderMap;
use http_body::{Frame, SizeHint};
use tonic::{Code, Status, body::Body};

use super::{Request, Response};
use crate::metrics::{self, Calls, OpenCall};

/// Measures a call, or returns `None` for a scrape, which is not counted.
pub(super) fn begin(calls: &Calls, call: &Request) -> Option<OpenCall> {
    let path = call.uri().path();
    (path != metrics::PATH).then(|| calls.begin(path))
}

/// Counts the call by its status code, which an immediate error has in its headers, and any other response in its
/// trailers.
pub(super) fn count(open: Option<OpenCall>, answer: Response) -> Response {
    let Some(mut open) = open else {
        return answer;
    };
    open.answered();
    if let Some(code) = code_in(answer.headers()) {
        open.end(code);
        return answer;
    }
    answer.map(|body| Body::new(CountedBody { body, open }))
}

fn code_in(headers: &HeaderMap) -> Option<Code> {
    Status::from_header_map(headers).map(|status| status.code())
}

/// A response body that records the status code of its trailers.
#[derive(Debug)]
struct CountedBody {
    body: Body,
    open: OpenCall,
}

impl http_body::Body for CountedBody {
    type Data = <Body as http_body::Body>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(code) = frame.trailers_ref().and_then(code_in) {
                    self.open.end(code);
                }
            }
            Poll::Ready(Some(Err(status))) => self.open.end(status.code()),
            // The body ended without trailers, so the status code is unknown.
            Poll::Ready(None) => self.open.end(Code::Unknown),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
