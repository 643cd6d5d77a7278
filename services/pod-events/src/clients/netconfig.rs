use std::net::IpAddr;

use inpod_proto::{
    Invalid, addresses_from, addresses_to,
    netconfig::v1::{self as wire, inspect_netns_request, list_listeners_request},
    required,
};
use inpod_types::{Failure, NetnsId, NetnsRef, Reason, SandboxRef};
use tokio::time::{Instant, timeout_at};
use tonic::Streaming;

use super::{Clients, Netconfig, deadline_in, to_result};
use crate::{binds::Socket, checkpoint::Record};

#[derive(Clone, Debug)]
pub struct ClaimedNetns {
    pub id: NetnsId,
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Debug)]
pub struct FoundNetns {
    pub sandbox: SandboxRef,
    /// The reference to the netns, by the path at which netconfig opened the netns.
    pub netns: NetnsRef,
    pub id: NetnsId,
    /// Set if the netns holds rules that netconfig can neither see nor replace, and no rules that netconfig can see.
    pub only_legacy_nat: bool,
}

/// The part of a netns that an inspection reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InspectionScope {
    All,
    CapturedFlows,
    Processes,
}

/// Converts an invalid field of a response to a failure.
fn valid<T>(field: Result<T, Invalid>) -> Result<T, Failure> {
    field.map_err(|error| {
        let name = error.field();
        let message = format!("netconfig answered with an invalid {name}: {error}");
        Failure::new(Reason::Internal, message)
    })
}

/// Returns the addresses at which the kubelet probes a pod, at most as many as `ApplyRulesRequest` takes.
fn probe_addresses(addresses: &[IpAddr]) -> Vec<String> {
    const MAX_PROBE_ADDRESSES: usize = 16;
    addresses_to(addresses.get(..MAX_PROBE_ADDRESSES).unwrap_or(addresses))
}

impl Clients {
    pub async fn leave_node(&self) -> Result<(), Failure> {
        let message = wire::LeaveNodeRequest {};
        self.netconfig(Netconfig::leave_node, message, deadline_in(15))
            .await?;
        Ok(())
    }

    pub async fn claim(&self, record: &Record, deadline: Instant) -> Result<ClaimedNetns, Failure> {
        self.claim_netns(record, wire::ProbeExemption::Unspecified, deadline)
            .await
    }

    /// Claims a netns, and has netconfig set the probe addresses while ztunnel opens its listeners.
    pub(crate) async fn claim_and_prepare(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<ClaimedNetns, Failure> {
        self.claim_netns(record, wire::ProbeExemption::Prepare, deadline)
            .await
    }

    async fn claim_netns(
        &self,
        record: &Record,
        exemption: wire::ProbeExemption,
        deadline: Instant,
    ) -> Result<ClaimedNetns, Failure> {
        let message = wire::ClaimNetnsRequest {
            sandbox: Some((&record.sandbox).into()),
            netns: Some((&record.expected_netns()).into()),
            addresses: addresses_to(&record.addresses),
            probe_exemption: exemption.into(),
        };
        let claimed = self
            .netconfig(Netconfig::claim_netns, message, deadline)
            .await?;
        Ok(ClaimedNetns {
            id: valid(required("netns", claimed.netns))?,
            addresses: valid(addresses_from(&claimed.addresses, "addresses"))?,
        })
    }

    /// Claims a netns, and sets whether the kubelet's probes of the pod bypass ztunnel before `apply`.
    pub(crate) async fn exempt_probes(
        &self,
        record: &Record,
        is_exempt: bool,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let exemption = if is_exempt {
            wire::ProbeExemption::On
        } else {
            wire::ProbeExemption::Off
        };
        let message = wire::ClaimNetnsRequest {
            sandbox: Some((&record.sandbox).into()),
            netns: Some((&record.expected_netns()).into()),
            addresses: probe_addresses(&record.addresses),
            probe_exemption: exemption.into(),
        };
        self.netconfig(Netconfig::claim_netns, message, deadline)
            .await
            .map(drop)
    }

    pub async fn release(&self, sandbox: &SandboxRef, deadline: Instant) -> Result<(), Failure> {
        let message = wire::ReleaseNetnsRequest {
            sandbox: Some(sandbox.into()),
        };
        self.netconfig(Netconfig::release_netns, message, deadline)
            .await?;
        Ok(())
    }

    /// Applies a pod's rules and returns the fingerprint of the rules. With `require_listeners`, netconfig refuses rules to a
    /// port without ztunnel's listener.
    pub async fn apply(
        &self,
        record: &Record,
        require_listeners: bool,
        deadline: Instant,
    ) -> Result<String, Failure> {
        let message = wire::ApplyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
            // The kubelet's probes go through the sidecar like any other traffic.
            probe_addresses: if record.redirection.is_sidecar() {
                Vec::new()
            } else {
                probe_addresses(&record.addresses)
            },
            require_listeners,
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
    ) -> Result<wire::VerifyRulesResponse, Failure> {
        let message = wire::VerifyRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
        };
        self.netconfig(Netconfig::verify_rules, message, deadline)
            .await
    }

    /// Compares the rules in a netns with the expected rules; returns the plan for applying the expected rules.
    pub async fn plan_rules(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<wire::PlanRulesResponse, Failure> {
        let message = wire::PlanRulesRequest {
            sandbox: Some((&record.sandbox).into()),
            redirection: Some(record.redirection.to_wire(&self.capture)),
        };
        self.netconfig(Netconfig::plan_rules, message, deadline)
            .await
    }

    /// Removes rules and returns the number of captured connections.
    pub async fn remove_rules(
        &self,
        sandbox: &SandboxRef,
        phase: wire::RemovePhase,
        deadline: Instant,
    ) -> Result<u32, Failure> {
        let message = wire::RemoveRulesRequest {
            sandbox: Some(sandbox.into()),
            phase: phase.into(),
        };
        let removed = self
            .netconfig(Netconfig::remove_rules, message, deadline)
            .await?;
        Ok(removed.captured_flows)
    }

    /// Inspects a claimed netns, or the netns at a path.
    pub async fn inspect(
        &self,
        target: inspect_netns_request::Target,
        scope: InspectionScope,
        deadline: Instant,
    ) -> Result<wire::InspectNetnsResponse, Failure> {
        let message = wire::InspectNetnsRequest {
            target: Some(target),
            captured_flows_only: scope == InspectionScope::CapturedFlows,
            processes_only: scope == InspectionScope::Processes,
            ..wire::InspectNetnsRequest::default()
        };
        self.netconfig(Netconfig::inspect_netns, message, deadline)
            .await
    }

    /// Returns the conditions in a pod's claimed netns with an effect on redirection.
    pub(crate) async fn find_conflicts(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<Vec<wire::Finding>, Failure> {
        let sandbox = (&record.sandbox).into();
        let message = wire::InspectNetnsRequest {
            target: Some(inspect_netns_request::Target::Sandbox(sandbox)),
            findings_only: true,
            pod_uid: record.cgroup_uid().to_string(),
            ..wire::InspectNetnsRequest::default()
        };
        let inspected = self
            .netconfig(Netconfig::inspect_netns, message, deadline)
            .await?;
        Ok(inspected.findings)
    }

    pub async fn list_claims(&self, deadline: Instant) -> Result<Vec<SandboxRef>, Failure> {
        let message = wire::ListClaimsRequest {};
        let listed = self
            .netconfig(Netconfig::list_claims, message, deadline)
            .await?;
        let claims = listed.claims.into_iter();
        claims
            .map(|claim| valid(required("sandbox", claim.sandbox)))
            .collect()
    }

    /// Lists the sockets in a claimed netns, or in the netns at a path.
    pub(crate) async fn sockets(
        &self,
        target: list_listeners_request::Target,
        deadline: Instant,
    ) -> Result<Vec<Socket>, Failure> {
        let message = wire::ListListenersRequest {
            target: Some(target),
        };
        let listed = self
            .netconfig(Netconfig::list_listeners, message, deadline)
            .await?;
        let sockets = listed.listeners.into_iter().map(Socket::try_from);
        let sockets: Result<_, Invalid> = sockets.collect();
        valid(sockets.map_err(|error| error.within("listeners")))
    }

    /// Finds the netns of a pod for which no ADD was received: see `FindNetns`.
    pub async fn find_netns(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<FoundNetns, Failure> {
        let turn = timeout_at(deadline, self.searches.acquire()).await;
        let _turn = turn.map_err(|_elapsed| {
            let message = "the search for other pods' network namespaces took until the deadline";
            Failure::new(Reason::DeadlineExceeded, message)
        })?;
        let message = wire::FindNetnsRequest {
            pod_uid: record.cgroup_uid().to_string(),
            addresses: probe_addresses(&record.addresses),
        };
        let found = self
            .netconfig(Netconfig::find_netns, message, deadline)
            .await?;
        Ok(FoundNetns {
            sandbox: valid(required("sandbox", found.sandbox))?,
            netns: NetnsRef::from_path(found.path),
            id: valid(required("netns", found.netns))?,
            only_legacy_nat: found.only_legacy_nat,
        })
    }

    pub async fn watch_drift(&self) -> Result<Streaming<wire::WatchDriftResponse>, Failure> {
        let mut client = self.netconfig.clone();
        let answer = client.watch_drift(wire::WatchDriftRequest {}).await;
        to_result("netconfig", answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_addresses_are_named_for_probes_than_netconfig_takes() {
        let addresses: Vec<IpAddr> = (0..1000u32).map(|n| IpAddr::V4(n.into())).collect();
        assert_eq!(probe_addresses(&addresses).len(), 16);
        assert_eq!(probe_addresses(addresses.get(..2).unwrap()).len(), 2);
    }
}
