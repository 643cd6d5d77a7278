//! Inspects a claimed netns or, for callers allowed to claim, a netns at a path.

use std::sync::Arc;

use inpod_linux::Netns;
use inpod_proto::{
    Class, addresses_to,
    netconfig::v1::{
        InspectNetnsResponse, ListListenersResponse, inspect_netns_request, list_listeners_request,
    },
    required,
    types::v1::{NetnsRef, SandboxRef},
};
use inpod_service::peer::Peer;
use inpod_types::{ContainerId, with_causes};
use tonic::Status;

use super::{
    Handler,
    wire::{describe_finding, describe_listener, describe_process, missing, refuse},
    work::blocking,
};
use crate::{
    apply::{Observation, Writer},
    claims::{Claim, Claims, validate},
    conflicts,
    error::ClaimError,
    inspect::{self, Proxies},
};

pub(super) enum Target {
    Sandbox(SandboxRef),
    Netns(NetnsRef),
}

impl From<inspect_netns_request::Target> for Target {
    fn from(target: inspect_netns_request::Target) -> Self {
        match target {
            inspect_netns_request::Target::Sandbox(sandbox) => Self::Sandbox(sandbox),
            inspect_netns_request::Target::Netns(netns) => Self::Netns(netns),
        }
    }
}

impl From<list_listeners_request::Target> for Target {
    fn from(target: list_listeners_request::Target) -> Self {
        match target {
            list_listeners_request::Target::Sandbox(sandbox) => Self::Sandbox(sandbox),
            list_listeners_request::Target::Netns(netns) => Self::Netns(netns),
        }
    }
}

pub(super) enum InspectedNetns {
    Claimed(Arc<Claim>),
    Open(Netns),
}

impl InspectedNetns {
    fn netns(&self) -> &Netns {
        match self {
            Self::Claimed(claim) => &claim.netns,
            Self::Open(netns) => netns,
        }
    }

    fn container_id(&self) -> Option<&ContainerId> {
        match self {
            Self::Claimed(claim) => Some(&claim.sandbox.container_id),
            Self::Open(_) => None,
        }
    }
}

impl Handler {
    pub(super) async fn inspect_target<T: Send + 'static>(
        &self,
        peer: &Peer,
        target: Option<impl Into<Target>>,
        inspect: impl FnOnce(&InspectedNetns) -> Result<T, ClaimError> + Send + 'static,
    ) -> Result<T, Status> {
        match target.ok_or_else(|| missing("target"))?.into() {
            Target::Sandbox(sandbox) => {
                let claim = self.claim_of(Some(sandbox))?;
                blocking(move || inspect(&InspectedNetns::Claimed(claim))).await
            }
            Target::Netns(netns) => {
                // Opening a path takes the same right as claiming the netns.
                peer.require(Class::Service, "inspection of a path")?;
                let wanted = required("netns", Some(netns)).map_err(refuse)?;
                let roots = Arc::clone(&self.roots);
                blocking(move || inspect(&InspectedNetns::Open(validate::open(&wanted, &roots)?)))
                    .await
            }
        }
    }
}

/// Returns the users of a sidecar's proxy. For a claimed netns, the last observation names them at no cost.
fn proxies(subject: &InspectedNetns, claims: &Claims, writer: &Writer) -> Proxies {
    let published = match subject {
        InspectedNetns::Claimed(claim) => claims.last_published(claim),
        InspectedNetns::Open(_) => None,
    };
    if let Some(state) = published {
        return state.observation.proxies.clone();
    }
    let observed = writer.observe(subject.netns()).unwrap_or_else(|error| {
        let error = with_causes(&error);
        tracing::debug!(error, "Cannot tell whether a sidecar is in a netns");
        Observation::default()
    });
    observed.proxies
}

/// Returns the netns, its processes, and whether the path still leads to the netns.
pub(super) fn inspect_processes(
    subject: &InspectedNetns,
) -> Result<InspectNetnsResponse, ClaimError> {
    let netns = subject.netns();
    let container_id = subject.container_id().map(ContainerId::as_str);
    let processes = inspect::processes(netns, container_id)?;
    Ok(InspectNetnsResponse {
        netns: Some(netns.id().into()),
        processes: processes.into_iter().map(describe_process).collect(),
        path_intact: netns.path_intact(),
        ..InspectNetnsResponse::default()
    })
}

/// Returns the netns and the number of its captured connections.
pub(super) fn inspect_captured_flows(
    subject: &InspectedNetns,
) -> Result<InspectNetnsResponse, ClaimError> {
    let netns = subject.netns();
    Ok(InspectNetnsResponse {
        netns: Some(netns.id().into()),
        captured_flows: inspect::captured_flows(netns)?,
        ..InspectNetnsResponse::default()
    })
}

pub(super) fn inspect(
    subject: &InspectedNetns,
    claims: &Claims,
    writer: &Writer,
) -> Result<InspectNetnsResponse, ClaimError> {
    let netns = subject.netns();
    let sockets = inspect::sockets(netns, &proxies(subject, claims, writer))?;
    let addresses = inspect::addresses(netns)?;
    let given = match subject {
        InspectedNetns::Claimed(claim) => &claim.addresses,
        InspectedNetns::Open(_) => &addresses,
    };
    let findings = conflicts::find_conflicts(netns, given)?;
    Ok(InspectNetnsResponse {
        addresses: addresses_to(&addresses),
        listening_ports: sockets.listening_ports.into_iter().map(u32::from).collect(),
        captured_flows: sockets.captured_flows,
        direct_flows: sockets.direct_flows,
        findings: findings.into_iter().map(describe_finding).collect(),
        ..inspect_processes(subject)?
    })
}

pub(super) fn listeners(subject: &InspectedNetns) -> Result<ListListenersResponse, ClaimError> {
    let listeners = inspect::listeners(subject.netns())?;
    Ok(ListListenersResponse {
        instance_id: String::new(),
        netns: Some(subject.netns().id().into()),
        listeners: listeners.iter().map(describe_listener).collect(),
    })
}
