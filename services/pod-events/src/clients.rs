//! gRPC clients of the other services. Every call ends by its deadline.

mod broker;
mod find;
mod listeners;
mod plan;

use std::{net::IpAddr, sync::Arc, time::Duration};

use inpod_proto::{
    addresses_from, addresses_to, failure_of,
    netconfig::v1::{
        self as netconfig, inspect_netns_request::Target,
        netconfig_service_client::NetconfigServiceClient,
    },
    required,
    ztunnelbroker::v1::ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
};
use inpod_types::{Failure, NetnsId, NetnsRef, Reason, SandboxRef};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
#[cfg(not(test))]
use tonic::transport::Channel as Transport;
use tonic::{Code, Request, Response, Status};

#[cfg(test)]
use crate::testing::Transport;
use crate::{checkpoint::Record, redirection::Capture, trace};

pub(crate) use broker::ztunnels;
pub use find::FoundNetns;

/// The instance of a service; `None` while the service is away.
pub(crate) type Instance = Option<Arc<str>>;

const MAX_CONCURRENT_SEARCHES: usize = 4;

const LEAVE_NODE_TIMEOUT: Duration = Duration::from_secs(15);

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

#[derive(Clone, Debug)]
pub struct ClaimedNetns {
    pub id: NetnsId,
    pub addresses: Vec<IpAddr>,
}

pub(crate) fn deadline_in(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

fn request<T>(message: T, deadline: Instant) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    trace::inject(request.metadata_mut());
    request
}

/// Waits for a response until 50 ms past the service's deadline.
async fn call<T>(
    service: &'static str,
    deadline: Instant,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Failure> {
    match timeout_at(deadline + Duration::from_millis(50), answer).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(to_failure(service, &status)),
        Err(_elapsed) => Err(Failure::new(
            Reason::DeadlineExceeded,
            format!("{service} did not answer in time"),
        )),
    }
}

/// Converts a status to a failure. Messages of the transport get the service's name.
fn to_failure(service: &'static str, status: &Status) -> Failure {
    let failure = failure_of(status);
    let from_transport = status.details().is_empty();
    // A connection that breaks during a call is INTERNAL for tonic ("h2 protocol error"); a defect reported by an inpod
    // service carries its failure in the details.
    let broken = matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Internal
    );
    let unreachable = from_transport && broken;
    let message = if unreachable {
        format!("cannot reach {service}: {}", failure.message)
    } else if from_transport {
        format!("{service}: {}", failure.message)
    } else {
        failure.message.clone()
    };
    let reason = if unreachable {
        Reason::DependencyUnavailable
    } else {
        failure.reason
    };
    Failure {
        message,
        reason,
        ..failure
    }
}

fn invalid_response(service: &'static str, error: &inpod_proto::Invalid) -> Failure {
    let message = format!(
        "{service} answered with an invalid {}: {error}",
        error.field()
    );
    Failure::new(Reason::Internal, message)
}

/// Returns the addresses at which the kubelet probes a pod, at most as many as `ApplyRulesRequest` takes.
fn probe_addresses(addresses: &[IpAddr]) -> Vec<String> {
    const MAX_PROBE_ADDRESSES: usize = 16;
    addresses_to(addresses.get(..MAX_PROBE_ADDRESSES).unwrap_or(addresses))
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
        let mut client = self.netconfig.clone();
        let answer = method(&mut client, request(message, deadline));
        call("netconfig", deadline, answer).await
    }

    /// Calls a method of the broker.
    async fn broker<M, T>(
        &self,
        method: impl AsyncFnOnce(&mut Broker, Request<M>) -> Result<Response<T>, Status>,
        message: M,
        deadline: Instant,
    ) -> Result<T, Failure> {
        let mut client = self.broker.clone();
        let answer = method(&mut client, request(message, deadline));
        call("ztunnel-broker", deadline, answer).await
    }

    pub async fn leave_node(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + LEAVE_NODE_TIMEOUT;
        let message = netconfig::LeaveNodeRequest {};
        self.netconfig(Netconfig::leave_node, message, deadline)
            .await?;
        Ok(())
    }

    pub async fn claim(
        &self,
        sandbox: &SandboxRef,
        netns: &NetnsRef,
        addresses: &[IpAddr],
        deadline: Instant,
    ) -> Result<ClaimedNetns, Failure> {
        let message = netconfig::ClaimNetnsRequest {
            sandbox: Some(sandbox.into()),
            netns: Some(netns.into()),
            addresses: addresses_to(addresses),
        };
        let claimed = self
            .netconfig(Netconfig::claim_netns, message, deadline)
            .await?;
        let invalid = |error| invalid_response("netconfig", &error);
        Ok(ClaimedNetns {
            id: required("netns", claimed.netns).map_err(invalid)?,
            addresses: addresses_from(&claimed.addresses, "addresses").map_err(invalid)?,
        })
    }

    pub async fn release(&self, sandbox: &SandboxRef, deadline: Instant) -> Result<(), Failure> {
        let message = netconfig::ReleaseNetnsRequest {
            sandbox: Some(sandbox.into()),
        };
        self.netconfig(Netconfig::release_netns, message, deadline)
            .await?;
        Ok(())
    }

    /// Applies a pod's rules and returns the fingerprint of the rules.
    pub async fn apply(&self, record: &Record, deadline: Instant) -> Result<String, Failure> {
        let message = netconfig::ApplyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
            // The kubelet's probes go through the sidecar like any other traffic.
            probe_addresses: if record.redirection.is_sidecar() {
                Vec::new()
            } else {
                probe_addresses(&record.addresses)
            },
        };
        let applied = self
            .netconfig(Netconfig::apply_rules, message, deadline)
            .await?;
        Ok(applied.fingerprint)
    }

    pub async fn verify(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<netconfig::VerifyRulesResponse, Failure> {
        let message = netconfig::VerifyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
        };
        self.netconfig(Netconfig::verify_rules, message, deadline)
            .await
    }

    /// Removes rules and returns the number of captured connections.
    pub async fn remove_rules(
        &self,
        sandbox: &SandboxRef,
        phase: netconfig::RemovePhase,
        deadline: Instant,
    ) -> Result<u32, Failure> {
        let message = netconfig::RemoveRulesRequest {
            sandbox: Some(sandbox.into()),
            phase: phase.into(),
        };
        let removed = self
            .netconfig(Netconfig::remove_rules, message, deadline)
            .await?;
        Ok(removed.captured_flows)
    }

    pub async fn inspect(
        &self,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<netconfig::InspectNetnsResponse, Failure> {
        let message = netconfig::InspectNetnsRequest {
            target: Some(Target::Sandbox(sandbox.into())),
            ..netconfig::InspectNetnsRequest::default()
        };
        self.inspect_netns(message, deadline).await
    }

    /// Returns the number of captured connections in a claimed netns.
    pub async fn captured_flows(
        &self,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<u32, Failure> {
        let message = netconfig::InspectNetnsRequest {
            target: Some(Target::Sandbox(sandbox.into())),
            captured_flows_only: true,
            ..netconfig::InspectNetnsRequest::default()
        };
        let inspected = self.inspect_netns(message, deadline).await?;
        Ok(inspected.captured_flows)
    }

    /// Inspects only the processes in a claimed netns, or in the netns at a path.
    pub async fn inspect_processes(
        &self,
        target: Target,
        deadline: Instant,
    ) -> Result<netconfig::InspectNetnsResponse, Failure> {
        let message = netconfig::InspectNetnsRequest {
            target: Some(target),
            processes_only: true,
            ..netconfig::InspectNetnsRequest::default()
        };
        self.inspect_netns(message, deadline).await
    }

    async fn inspect_netns(
        &self,
        message: netconfig::InspectNetnsRequest,
        deadline: Instant,
    ) -> Result<netconfig::InspectNetnsResponse, Failure> {
        self.netconfig(Netconfig::inspect_netns, message, deadline)
            .await
    }

    pub async fn list_claims(&self, deadline: Instant) -> Result<Vec<SandboxRef>, Failure> {
        let message = netconfig::ListClaimsRequest {};
        let claims = self
            .netconfig(Netconfig::list_claims, message, deadline)
            .await?
            .claims;
        let sandboxes = claims
            .into_iter()
            .map(|claim| required("sandbox", claim.sandbox));
        sandboxes
            .collect::<Result<_, _>>()
            .map_err(|error| invalid_response("netconfig", &error))
    }

    pub async fn watch_drift(
        &self,
    ) -> Result<tonic::Streaming<netconfig::WatchDriftResponse>, Failure> {
        let answer = self
            .netconfig
            .clone()
            .watch_drift(netconfig::WatchDriftRequest {})
            .await;
        answer
            .map(Response::into_inner)
            .map_err(|status| to_failure("netconfig", &status))
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

    #[test]
    fn no_more_addresses_are_named_for_probes_than_netconfig_takes() {
        let addresses: Vec<IpAddr> = (0..1000u32).map(|n| IpAddr::V4(n.into())).collect();
        assert_eq!(probe_addresses(&addresses).len(), 16);
        assert_eq!(probe_addresses(addresses.get(..2).unwrap()).len(), 2);
    }
}
