//! Inspects a claimed netns or, for callers allowed to claim, a netns at a path.

use std::sync::Arc;

use inpod_linux::Netns;
use inpod_proto::{
    Class, addresses_to,
    netconfig::v1::{
        InspectNetnsResponse, ListListenersResponse, inspect_netns_request::Target,
        list_listeners_request,
    },
    required,
};
use inpod_service::peer::Peer;
use inpod_types::cgroup::PodKey;
use tonic::Status;

use super::{
    Handler,
    wire::{describe_finding, describe_listener, describe_process, missing, refuse},
    work::blocking,
};
use crate::{
    apply::{Observation, Writer},
    claims::{Claim, validate},
    conflicts::{self, Subject, VerifiedListeners},
    error::Failed,
    inspect,
};

pub(super) fn to_inspect_target(target: list_listeners_request::Target) -> Target {
    match target {
        list_listeners_request::Target::Sandbox(sandbox) => Target::Sandbox(sandbox),
        list_listeners_request::Target::Netns(netns) => Target::Netns(netns),
    }
}

impl Handler {
    pub(super) async fn inspect_target<T: Send + 'static>(
        &self,
        peer: &Peer,
        target: Option<Target>,
        inspect: impl FnOnce(&Netns, Option<&Claim>) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Status> {
        match target.ok_or_else(|| missing("target"))? {
            Target::Sandbox(sandbox) => {
                let claim = self.claim_of(Some(sandbox))?;
                blocking(move || inspect(&claim.netns, Some(&claim))).await
            }
            Target::Netns(netns) => {
                // Opening a path takes the same right as claiming the netns.
                peer.require(Class::Service, "inspection of a path")?;
                let wanted = required("netns", Some(netns)).map_err(refuse)?;
                let roots = Arc::clone(&self.roots);
                blocking(move || inspect(&validate::open(&wanted, &roots)?, None)).await
            }
        }
    }
}

/// Returns the netns, its processes, and whether the path still leads to the netns.
pub(super) fn inspect_processes(
    netns: &Netns,
    claim: Option<&Claim>,
) -> Result<InspectNetnsResponse, Failed> {
    let container_id = claim.map(|claim| claim.sandbox.container_id.as_str());
    let processes = inspect::processes(netns, container_id)?;
    Ok(InspectNetnsResponse {
        netns: Some(netns.id().into()),
        processes: processes.into_iter().map(describe_process).collect(),
        path_intact: netns.path_intact(),
        ..InspectNetnsResponse::default()
    })
}

/// Returns the netns and the number of its captured connections.
pub(super) fn inspect_captured_flows(netns: &Netns) -> Result<InspectNetnsResponse, Failed> {
    Ok(InspectNetnsResponse {
        netns: Some(netns.id().into()),
        captured_flows: inspect::captured_flows(netns)?,
        ..InspectNetnsResponse::default()
    })
}

/// Returns the netns and the conditions that prevent redirection, or could do so.
pub(super) fn inspect_findings(
    netns: &Netns,
    claim: Option<&Claim>,
    pod: Option<PodKey>,
) -> Result<InspectNetnsResponse, Failed> {
    let (addresses, verified) = (inspect::addresses(netns)?, VerifiedListeners::default());
    let subject = Subject {
        addresses: claim.map_or(&addresses, |claim| &claim.addresses),
        pod,
        verified: claim.map_or(&verified, |claim| &claim.verified_listeners),
    };
    let findings = conflicts::find_conflicts_of(netns, subject)?;
    Ok(InspectNetnsResponse {
        netns: Some(netns.id().into()),
        findings: findings.into_iter().map(describe_finding).collect(),
        ..InspectNetnsResponse::default()
    })
}

pub(super) fn inspect(
    netns: &Netns,
    claim: Option<&Claim>,
    writer: &Writer,
    pod: Option<PodKey>,
) -> Result<InspectNetnsResponse, Failed> {
    let observed = writer.observe(netns).unwrap_or_else(|error| {
        tracing::debug!(%error, "Cannot read the rules of a netns");
        Observation::default()
    });
    let sockets = inspect::sockets(netns, &observed.proxies)?;
    Ok(InspectNetnsResponse {
        addresses: addresses_to(&inspect::addresses(netns)?),
        listening_ports: sockets.listening_ports.into_iter().map(u32::from).collect(),
        captured_flows: sockets.captured_flows,
        direct_flows: sockets.direct_flows,
        uncaptured_udp_flows: observed.uncaptured_udp_flows.unwrap_or_default(),
        findings: inspect_findings(netns, claim, pod)?.findings,
        ..inspect_processes(netns, claim)?
    })
}

pub(super) fn listeners(netns: &Netns) -> Result<ListListenersResponse, Failed> {
    let listeners = inspect::listeners(netns)?;
    Ok(ListListenersResponse {
        instance_id: String::new(),
        netns: Some(netns.id().into()),
        listeners: listeners.iter().map(describe_listener).collect(),
    })
}
