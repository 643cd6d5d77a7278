//! Calls `pod-events` over gRPC, and translates gRPC errors into CNI errors for the runtime.

use std::{error::Error, path::Path, time::Duration};

use inpod_cni::{
    config::Settings,
    error::{CniError, ErrorCode},
};
use inpod_proto::{failure_of, podevents::v1::pod_events_service_client::PodEventsServiceClient};
use inpod_types::{Failure, Reason};
use tonic::{Code, Request, Response, Status, codegen::http::Uri};

use crate::{
    call::{Call, Trace},
    http2::Transport,
};

/// Extra time for the agent's response, because an error of the agent names the step that timed out.
const DEADLINE_GRACE: Duration = Duration::from_millis(100);

/// A placeholder, because HTTP/2 requires an authority and a Unix socket has none.
const ORIGIN: &str = "http://localhost";

pub(crate) type Client = PodEventsServiceClient<Transport>;

#[derive(Debug)]
pub(crate) enum AgentError {
    /// No process listens on the socket, so the agent has not seen the call.
    Unreachable(String),
    /// The agent reported an error or did not answer, and may have acted on the call.
    Failed(Code, Failure),
}

pub(crate) struct Agent<'a> {
    socket: &'a Path,
    trace: Option<&'a Trace>,
    remaining: Duration,
}

impl<'a> Agent<'a> {
    /// Sets the deadline to the time left of `call`, less `reserve` for later steps of the caller.
    pub(crate) fn new(settings: &'a Settings, call: &'a Call, reserve: Duration) -> Self {
        Self {
            socket: &settings.agent_socket,
            trace: call.trace.as_ref(),
            remaining: call.remaining(reserve + DEADLINE_GRACE),
        }
    }

    pub(crate) fn send<Req, Res>(
        &self,
        message: Req,
        rpc: impl AsyncFnOnce(&mut Client, Request<Req>) -> Result<Response<Res>, Status>,
    ) -> Result<Res, AgentError> {
        // Without time left, the error has to be a timeout, because the agent may well be reachable.
        if self.remaining.is_zero() {
            return Err(self.timed_out());
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| internal_error(format!("cannot start the client: {error}")))?;
        runtime.block_on(async {
            let mut client = self.connect().await?;
            let request = self.request(message)?;
            match tokio::time::timeout(self.remaining + DEADLINE_GRACE, rpc(&mut client, request))
                .await
            {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(self.to_error(&status)),
                Err(_) => Err(self.timed_out()),
            }
        })
    }

    async fn connect(&self) -> Result<Client, AgentError> {
        match Transport::connect(self.socket).await {
            Ok(transport) => Ok(Client::with_origin(transport, Uri::from_static(ORIGIN))),
            Err(error) => Err(self.unreachable(&root_cause(&*error))),
        }
    }

    fn request<Req>(&self, message: Req) -> Result<Request<Req>, AgentError> {
        let mut request = Request::new(message);
        request.set_timeout(self.remaining);
        if let Some(trace) = self.trace {
            let value = trace.traceparent().parse();
            let value = value.map_err(|_| {
                internal_error("traceparent is not a valid header value".to_owned())
            })?;
            request.metadata_mut().insert("traceparent", value);
        }
        Ok(request)
    }

    fn unreachable(&self, problem: &str) -> AgentError {
        let socket = self.socket.display();
        AgentError::Unreachable(format!(
            "cannot connect to pod-events at {socket}: {problem}"
        ))
    }

    fn to_error(&self, status: &Status) -> AgentError {
        // tonic's server answers CANCELLED once the received deadline has passed; no failure of inpod has this code.
        if status.code() == Code::Cancelled {
            return self.timed_out();
        }
        // tonic sets a source only if the transport created the status, so the code is not from the agent.
        if status.source().is_none() {
            return AgentError::Failed(status.code(), failure_of(status));
        }
        let msg = format!("pod-events closed the connection: {}", root_cause(status));
        AgentError::Failed(
            Code::Unavailable,
            Failure::new(Reason::AgentUnavailable, msg),
        )
    }

    fn timed_out(&self) -> AgentError {
        let msg = format!(
            "pod-events did not answer within {:.1} s",
            self.remaining.as_secs_f32()
        );
        AgentError::Failed(
            Code::DeadlineExceeded,
            Failure::new(Reason::DeadlineExceeded, msg),
        )
    }
}

fn internal_error(problem: String) -> AgentError {
    AgentError::Failed(Code::Internal, Failure::new(Reason::Internal, problem))
}

/// Returns the innermost error, because the outer errors are only "transport error".
fn root_cause(error: &dyn Error) -> String {
    let mut root_cause = error;
    while let Some(source) = root_cause.source() {
        root_cause = source;
    }
    root_cause.to_string()
}

impl From<AgentError> for CniError {
    fn from(error: AgentError) -> Self {
        match error {
            AgentError::Unreachable(problem) => {
                let failure = Failure::new(Reason::AgentUnavailable, problem);
                to_cni_error(ErrorCode::TryAgainLater, &failure)
            }
            AgentError::Failed(code, failure) => to_cni_error(error_code(code), &failure),
        }
    }
}

/// Formats problem and remedy, both of which the runtime shows in the pod's events.
fn to_cni_error(code: ErrorCode, failure: &Failure) -> CniError {
    let mut msg = failure.message.clone();
    if !failure.field.is_empty() {
        msg = format!("{msg} (field {})", failure.field);
    }
    let mut details = format!("{} [{}]", failure.reason.remedy(), failure.reason);
    for undone in &failure.undo_failures {
        details = format!("{details} Left behind: {undone}.");
    }
    CniError::new(code, format!("inpod: {msg}")).with_details(details)
}

/// Returns code 11 if a retry can succeed, and code 100 for all other errors.
fn error_code(code: Code) -> ErrorCode {
    match code {
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::Cancelled
        | Code::Unknown => ErrorCode::TryAgainLater,
        Code::Ok
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => ErrorCode::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_grpc_maps_to_retry_or_refused() {
        for (code, number) in [
            (Code::Ok, 100),
            (Code::Cancelled, 11),
            (Code::Unknown, 11),
            (Code::InvalidArgument, 100),
            (Code::DeadlineExceeded, 11),
            (Code::NotFound, 100),
            (Code::AlreadyExists, 100),
            (Code::PermissionDenied, 100),
            (Code::ResourceExhausted, 11),
            (Code::FailedPrecondition, 100),
            (Code::Aborted, 11),
            (Code::OutOfRange, 100),
            (Code::Unimplemented, 100),
            (Code::Internal, 100),
            (Code::Unavailable, 11),
            (Code::DataLoss, 100),
            (Code::Unauthenticated, 100),
        ] {
            assert_eq!(error_code(code).number(), number, "{code:?}");
        }
    }

    #[test]
    fn a_failure_is_reported_with_its_field_its_remedy_and_what_was_left_behind() {
        let failure = Failure {
            undo_failures: vec!["a rule could not be removed".into()],
            ..Failure::new(Reason::AddressMismatch, "the netns holds none of 10.0.0.2")
                .at_field("addresses")
        };
        let error = CniError::from(AgentError::Failed(Code::FailedPrecondition, failure));
        assert_eq!(error.code, ErrorCode::Refused);
        assert_eq!(
            error.msg,
            "inpod: the netns holds none of 10.0.0.2 (field addresses)"
        );
        assert!(error.details.starts_with(Reason::AddressMismatch.remedy()));
        assert!(
            error.details.contains("[ADDRESS_MISMATCH]"),
            "{}",
            error.details
        );
        assert!(
            error
                .details
                .ends_with("Left behind: a rule could not be removed.")
        );
    }
}
