//! The other services, as calls that take checked values and end in time.

mod broker;
mod find;
mod listeners;
mod plan;

use std::{net::IpAddr, sync::Arc, time::Duration};

use inpod_proto::{
    addresses_from, addresses_to, failure_of,
    netconfig::v1::{self as netconfig, netconfig_service_client::NetconfigServiceClient},
    required,
    ztunnelbroker::v1::ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
};
use inpod_types::{Failure, NetnsId, NetnsRef, Reason, SandboxRef};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tonic::{Code, Request, Response, Status, transport::Channel};

use crate::{checkpoint::Record, redirection::Capture, trace};

pub use find::FoundNetns;

/// How many pods are looked for at once.
const MAX_CONCURRENT_SEARCHES: usize = 4;

/// How long the node's own network may take to be cleared.
const LEAVE_NODE_TIMEOUT: Duration = Duration::from_secs(15);

/// Clients of netconfig and of the broker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Clients {
    netconfig: NetconfigServiceClient<Channel>,
    broker: ZtunnelBrokerServiceClient<Channel>,
    capture: Arc<Capture>,
    /// Each search goes through all processes of the node.
    searches: Arc<Semaphore>,
}

/// A netns that netconfig has proven and holds.
#[derive(Clone, Debug)]
pub struct ClaimedNetns {
    /// Which.
    pub id: NetnsId,
    /// The pod's addresses in it.
    pub addresses: Vec<IpAddr>,
}

/// One request, with the time it has left.
fn request<T>(message: T, deadline: Instant) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    trace::pass_on(request.metadata_mut());
    request
}

/// Waits for an answer. A service that does not answer at all is given up a moment after the deadline it was told.
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

/// A failure of a service, with its name where the words do not come from the service itself.
fn to_failure(service: &'static str, status: &Status) -> Failure {
    let failure = failure_of(status);
    let from_transport = status.details().is_empty();
    // A connection that breaks under a call is INTERNAL to tonic ("h2 protocol error"); a defect of a service of ours
    // comes with its failure in the details.
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

/// The addresses at which a pod is probed: more than these no pod has (see `ApplyRulesRequest`), whatever a CNI result
/// says.
fn probe_addresses(addresses: &[IpAddr]) -> Vec<String> {
    const MAX_PROBE_ADDRESSES: usize = 16;
    addresses_to(addresses.get(..MAX_PROBE_ADDRESSES).unwrap_or(addresses))
}

impl Clients {
    /// Clients over channels that connect when they are first used.
    pub fn new(netconfig: Channel, broker: Channel, capture: Capture) -> Self {
        Self {
            netconfig: NetconfigServiceClient::new(netconfig),
            broker: ZtunnelBrokerServiceClient::new(broker),
            capture: Arc::new(capture),
            searches: Arc::new(Semaphore::new(MAX_CONCURRENT_SEARCHES)),
        }
    }

    /// Takes what is on the node's own network away: see `LeaveNode`.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn leave_node(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + LEAVE_NODE_TIMEOUT;
        let mut client = self.netconfig.clone();
        let request = request(netconfig::LeaveNodeRequest {}, deadline);
        call("netconfig", deadline, client.leave_node(request)).await?;
        Ok(())
    }

    /// The proof: see `ClaimNetns`.
    ///
    /// # Errors
    ///
    /// As the service says.
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
        let mut client = self.netconfig.clone();
        let claimed = call(
            "netconfig",
            deadline,
            client.claim_netns(request(message, deadline)),
        )
        .await?;
        let invalid = |error| invalid_response("netconfig", &error);
        Ok(ClaimedNetns {
            id: required("netns", claimed.netns).map_err(invalid)?,
            addresses: addresses_from(&claimed.addresses, "addresses").map_err(invalid)?,
        })
    }

    /// Forgets a netns; one that is not claimed succeeds.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn release(&self, sandbox: &SandboxRef, deadline: Instant) -> Result<(), Failure> {
        let message = netconfig::ReleaseNetnsRequest {
            sandbox: Some(sandbox.into()),
        };
        let mut client = self.netconfig.clone();
        call(
            "netconfig",
            deadline,
            client.release_netns(request(message, deadline)),
        )
        .await?;
        Ok(())
    }

    /// Has the redirection applied, and tells its fingerprint.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn apply(&self, record: &Record, deadline: Instant) -> Result<String, Failure> {
        let message = netconfig::ApplyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
            // A sidecar takes the kubelet's probes like anybody's.
            probe_addresses: if record.redirection.is_sidecar() {
                Vec::new()
            } else {
                probe_addresses(&record.addresses)
            },
        };
        let mut client = self.netconfig.clone();
        let applied = call(
            "netconfig",
            deadline,
            client.apply_rules(request(message, deadline)),
        )
        .await?;
        Ok(applied.fingerprint)
    }

    /// What differs between the rules in a netns and those that belong there.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn verify(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<netconfig::VerifyRulesResponse, Failure> {
        let message = netconfig::VerifyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
        };
        let mut client = self.netconfig.clone();
        call(
            "netconfig",
            deadline,
            client.verify_rules(request(message, deadline)),
        )
        .await
    }

    /// Takes rules away, and tells how many connections were captured.
    ///
    /// # Errors
    ///
    /// As the service says.
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
        let mut client = self.netconfig.clone();
        let removed = call(
            "netconfig",
            deadline,
            client.remove_rules(request(message, deadline)),
        )
        .await?;
        Ok(removed.captured_flows)
    }

    /// What is in a claimed netns.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn inspect(
        &self,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<netconfig::InspectNetnsResponse, Failure> {
        let target = netconfig::inspect_netns_request::Target::Sandbox(sandbox.into());
        let message = netconfig::InspectNetnsRequest {
            target: Some(target),
        };
        let mut client = self.netconfig.clone();
        call(
            "netconfig",
            deadline,
            client.inspect_netns(request(message, deadline)),
        )
        .await
    }

    /// What is in a netns that is not claimed.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn inspect_path(
        &self,
        netns: &NetnsRef,
        deadline: Instant,
    ) -> Result<netconfig::InspectNetnsResponse, Failure> {
        let target = netconfig::inspect_netns_request::Target::Netns(netns.into());
        let message = netconfig::InspectNetnsRequest {
            target: Some(target),
        };
        let mut client = self.netconfig.clone();
        call(
            "netconfig",
            deadline,
            client.inspect_netns(request(message, deadline)),
        )
        .await
    }

    /// The sandboxes for which netconfig holds a netns.
    ///
    /// # Errors
    ///
    /// As the service says.
    pub async fn list_claims(&self, deadline: Instant) -> Result<Vec<SandboxRef>, Failure> {
        let mut client = self.netconfig.clone();
        let message = netconfig::ListClaimsRequest {};
        let claims = call(
            "netconfig",
            deadline,
            client.list_claims(request(message, deadline)),
        )
        .await?
        .claims;
        let sandboxes = claims
            .into_iter()
            .map(|claim| required("sandbox", claim.sandbox));
        sandboxes
            .collect::<Result<_, _>>()
            .map_err(|error| invalid_response("netconfig", &error))
    }

    /// netconfig's claims and their changes.
    ///
    /// # Errors
    ///
    /// When the stream cannot be had.
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
    fn a_defect_that_a_service_tells_of_itself_stays_one() {
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
