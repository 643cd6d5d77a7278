//! Calls the services of a node over their sockets.

use std::{
    error::Error as _,
    path::{Path, PathBuf},
    time::Duration,
};

use inpod_proto::{
    failure_of, netconfig::v1::netconfig_service_client::NetconfigServiceClient,
    podevents::v1::pod_events_service_client::PodEventsServiceClient,
    ztunnelbroker::v1::ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
};
use inpod_types::{Failure, Reason};
use tokio::time::timeout;
use tonic::{Code, Request, Response, Status, transport::Channel};

use crate::error::CommandError;

pub(crate) const POD_EVENTS: &str = "pod-events";

pub(crate) const NETCONFIG: &str = "netconfig";

const BROKER: &str = "ztunnel-broker";

/// The largest accepted response: the list of all pods of a node may exceed the default of 4 MiB.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// The time that the client waits beyond the deadline sent to the service.
const GRACE: Duration = Duration::from_millis(500);

pub(crate) type PodEvents = PodEventsServiceClient<Channel>;
pub(crate) type Netconfig = NetconfigServiceClient<Channel>;
pub(crate) type Broker = ZtunnelBrokerServiceClient<Channel>;

/// A client of a service with one name on every node.
pub(crate) trait ServiceClient {
    const SERVICE: &'static str;

    fn connect(node: &Node) -> Self;
}

impl ServiceClient for PodEvents {
    const SERVICE: &'static str = POD_EVENTS;

    fn connect(node: &Node) -> Self {
        Self::new(node.channel(POD_EVENTS)).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

impl ServiceClient for Netconfig {
    const SERVICE: &'static str = NETCONFIG;

    fn connect(node: &Node) -> Self {
        Self::new(node.channel(NETCONFIG)).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

impl ServiceClient for Broker {
    const SERVICE: &'static str = BROKER;

    fn connect(node: &Node) -> Self {
        Self::new(node.channel(BROKER)).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    run_dir: PathBuf,
    timeout: Duration,
}

impl Node {
    pub(crate) fn new(run_dir: &Path, timeout: Duration) -> Self {
        let run_dir = run_dir.to_owned();
        Self { run_dir, timeout }
    }

    pub(crate) fn channel(&self, service: &str) -> Channel {
        inpod_service::channel(&inpod_service::socket(&self.run_dir, service))
    }

    pub(crate) fn socket(&self, service: &str) -> PathBuf {
        inpod_service::socket(&self.run_dir, service)
    }

    pub(crate) fn with_timeout(&self, timeout: Duration) -> Self {
        Self::new(&self.run_dir, timeout)
    }

    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    /// Calls a method of a service, such as `PodEvents::get_status`.
    pub(crate) async fn ask<C: ServiceClient, M, T>(
        &self,
        message: M,
        method: impl AsyncFnOnce(&mut C, Request<M>) -> Result<Response<T>, Status>,
    ) -> Result<T, CommandError> {
        let mut client = C::connect(self);
        let answer = method(&mut client, self.request(message));
        self.answer(C::SERVICE, answer).await
    }

    pub(crate) async fn answer<T>(
        &self,
        service: &'static str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CommandError> {
        match timeout(self.timeout + GRACE, answer).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(service, &status)),
            Err(_elapsed) => Err(self.unreachable(service, "no answer in time".to_owned())),
        }
    }

    pub(crate) fn unreachable(&self, service: &'static str, cause: String) -> CommandError {
        let socket = inpod_service::socket(&self.run_dir, service);
        CommandError::Unreachable {
            service,
            socket,
            cause,
        }
    }

    /// Converts a status to an error. A status without details was not sent by the service if its code is one of the
    /// transport's.
    pub(crate) fn error(&self, service: &'static str, status: &Status) -> CommandError {
        if status.details().is_empty() && is_of_transport(status.code()) {
            return self.unreachable(service, cause(status));
        }
        CommandError::Failed {
            service,
            socket: inpod_service::socket(&self.run_dir, service),
            failure: Box::new(failure_of(status)),
        }
    }
}

/// Returns whether the watching client was too slow for the stream and must start over.
pub(crate) fn is_behind(error: &CommandError) -> bool {
    let overloaded = |failure: &Failure| failure.reason == Reason::Overloaded;
    matches!(error, CommandError::Failed { failure, .. } if overloaded(failure))
}

fn is_of_transport(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::Unknown
            | Code::Internal
            | Code::Cancelled
            | Code::DeadlineExceeded
    )
}

/// Returns the innermost message of the error, because the outer "tcp connect error" is too vague.
fn cause(status: &Status) -> String {
    let mut source = status.source();
    let mut message = status.message().to_owned();
    while let Some(error) = source {
        message = error.to_string();
        source = error.source();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_a_service_tells_is_not_a_service_that_is_away() {
        let node = Node::new(Path::new("/run/x"), Duration::from_secs(1));
        let failure = inpod_proto::into_status(&Failure::new(Reason::SourceUnavailable, "no"));
        assert_eq!(node.error(POD_EVENTS, &failure).exit_code(), 1);
        let away = node.error(POD_EVENTS, &Status::unavailable("tcp connect error"));
        assert_eq!(away.exit_code(), 3);
        let text = away.to_string();
        assert!(
            text.contains("/run/x/pod-events/grpc.sock") && text.contains("What to do"),
            "{text}"
        );
        let behind = inpod_proto::into_status(&Failure::new(Reason::Overloaded, "read again"));
        assert!(is_behind(&node.error(POD_EVENTS, &behind)));
        assert!(!is_behind(&away));
    }
}
