//! gRPC clients of the other services. Every call ends by its deadline.

mod broker;
mod netconfig;

use std::{sync::Arc, time::Duration};

use inpod_proto::{
    failure_of, netconfig::v1::netconfig_service_client::NetconfigServiceClient,
    ztunnelbroker::v1::ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
};
use inpod_types::{Failure, Reason};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
#[cfg(not(test))]
use tonic::transport::Channel as Transport;
use tonic::{Code, Request, Response, Status};

#[cfg(test)]
use crate::testing::Transport;
use crate::{redirection::Capture, trace};

pub(crate) use broker::ztunnels;
pub use netconfig::{ClaimedNetns, FoundNetns, InspectionScope};

/// The instance of a service; `None` while the service is away.
pub(crate) type Instance = Option<Arc<str>>;

const MAX_CONCURRENT_SEARCHES: usize = 4;

type Netconfig = NetconfigServiceClient<Transport>;
type Broker = ZtunnelBrokerServiceClient<Transport>;

#[derive(Clone, Debug)]
pub struct Clients {
    netconfig: Netconfig,
    broker: Broker,
    capture: Arc<Capture>,
    /// Limits concurrent searches, because each search reads all processes of the node.
    searches: Arc<Semaphore>,
}

pub(crate) fn deadline_in(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

/// Calls a method, and waits for its response until 50 ms past the service's deadline.
async fn call<C: Clone, M, T>(
    service: &str,
    client: &C,
    method: impl AsyncFnOnce(&mut C, Request<M>) -> Result<Response<T>, Status>,
    message: M,
    deadline: Instant,
) -> Result<T, Failure> {
    let mut request = Request::new(message);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    trace::inject(request.metadata_mut());
    let mut client = client.clone();
    let answer = method(&mut client, request);
    let answered = timeout_at(deadline + Duration::from_millis(50), answer).await;
    let in_time = answered.map_err(|_elapsed| {
        let message = format!("{service} did not answer in time");
        Failure::new(Reason::DeadlineExceeded, message)
    })?;
    to_result(service, in_time)
}

fn to_result<T>(service: &str, answer: Result<Response<T>, Status>) -> Result<T, Failure> {
    answer
        .map(Response::into_inner)
        .map_err(|status| to_failure(service, &status))
}

/// Converts a status to a failure. Messages of the transport get the service's name.
fn to_failure(service: &str, status: &Status) -> Failure {
    let failure = failure_of(status);
    // A connection that breaks during a call is INTERNAL for tonic ("h2 protocol error"); a defect reported by an inpod
    // service carries its failure in the details.
    if !status.details().is_empty() {
        return failure;
    }
    let message = format!("{service}: {}", failure.message);
    let code = status.code();
    if !matches!(code, Code::Unavailable | Code::Unknown | Code::Internal) {
        return Failure { message, ..failure };
    }
    Failure {
        message: format!("cannot reach {message}"),
        reason: Reason::DependencyUnavailable,
        ..failure
    }
}

impl Clients {
    /// Creates clients that connect on first use.
    pub(crate) fn new(
        netconfig: impl Into<Transport>,
        broker: impl Into<Transport>,
        capture: Capture,
    ) -> Self {
        Self {
            netconfig: Netconfig::new(netconfig.into()),
            broker: Broker::new(broker.into()),
            capture: Arc::new(capture),
            searches: Arc::new(Semaphore::new(MAX_CONCURRENT_SEARCHES)),
        }
    }

    /// Calls a method of netconfig.
    async fn netconfig<M, T>(
        &self,
        method: impl AsyncFnOnce(&mut Netconfig, Request<M>) -> Result<Response<T>, Status>,
        message: M,
        deadline: Instant,
    ) -> Result<T, Failure> {
        call("netconfig", &self.netconfig, method, message, deadline).await
    }

    /// Calls a method of the broker.
    async fn broker<M, T>(
        &self,
        method: impl AsyncFnOnce(&mut Broker, Request<M>) -> Result<Response<T>, Status>,
        message: M,
        deadline: Instant,
    ) -> Result<T, Failure> {
        call("ztunnel-broker", &self.broker, method, message, deadline).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_breaks_under_a_call_is_a_service_that_is_away() {
        for code in [Code::Unavailable, Code::Unknown, Code::Internal] {
            let failure = to_failure("netconfig", &Status::new(code, "h2 protocol error"));
            assert_eq!(failure.reason, Reason::DependencyUnavailable, "{code:?}");
        }
    }

    #[test]
    fn a_defect_that_a_service_reports_of_itself_stays_one() {
        let defect = Failure::new(Reason::Internal, "netconfig failed");
        let failure = to_failure("netconfig", &inpod_proto::into_status(&defect));
        assert_eq!(failure.reason, Reason::Internal);
    }
}
