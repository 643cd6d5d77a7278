//! RPCs for the CNI plugin: ADD, CHECK and GC.

use std::collections::BTreeSet;

use inpod_proto::{
    Invalid, addresses_from,
    podevents::v1::{self as wire},
    required,
    types::v1 as types,
};
use inpod_service::Trace;
use inpod_types::{Enrollment, Failure, NetworkName, Reason, SandboxRef};
use tokio::time::Instant;
use tonic::Request;

use super::{QUERY_TIMEOUT, Server, parse_field, selection::Selection};
use crate::{
    checkpoint::{Intent, Record},
    clients,
    pod::PodKey,
    tasks::AddCall,
};

fn add_call(request: Request<wire::AddPodRequest>) -> Result<(PodKey, AddCall), Invalid> {
    let trace = Trace::from_headers(request.metadata().as_ref());
    let deadline = inpod_service::deadline(&request);
    let message = request.into_inner();
    let selector = message
        .pod
        .ok_or_else(|| Invalid::new("pod", "pod is required"))?;
    let key = (
        parse_field("pod.namespace", &selector.namespace)?,
        parse_field("pod.name", &selector.name)?,
    );
    let uid = Selection::parse(Some(selector))?.uid;
    let sandbox = required("sandbox", message.sandbox)?;
    let netns = required("netns", message.netns)?;
    let addresses = addresses_from(&message.addresses, "addresses")?;
    let call = AddCall::new(sandbox, uid, netns, addresses, deadline, trace);
    Ok((key, call))
}

impl Server {
    pub(super) async fn add(
        &self,
        request: Request<wire::AddPodRequest>,
    ) -> Result<wire::AddPodResponse, Failure> {
        let (key, call) = add_call(request)?;
        let timer = self.metrics.start_add(call.phases.clone());
        let added = self.registry.add(&key, call).await;
        timer.finish(&added);
        let added = added?;
        Ok(wire::AddPodResponse {
            enrollment: types::Enrollment::from(added.enrollment).into(),
            reason: added.reason.number(),
            pod: Some((&added.pod).into()),
        })
    }

    pub(super) async fn collect(
        &self,
        request: &wire::CollectGarbageRequest,
    ) -> Result<Vec<types::SandboxRef>, Invalid> {
        let network: NetworkName = parse_field("network_name", &request.network_name)?;
        if network.as_str().is_empty() {
            return Err(Invalid::new("network_name", "network_name is required"));
        }
        let sandbox = |attachment: &wire::Attachment| {
            let container_id = &attachment.container_id;
            Ok(SandboxRef {
                network_name: network.clone(),
                container_id: parse_field("valid_attachments.container_id", container_id)?,
                ifname: parse_field("valid_attachments.ifname", &attachment.ifname)?,
            })
        };
        let valid = request.valid_attachments.iter().map(sandbox);
        let valid = valid.collect::<Result<BTreeSet<_>, Invalid>>()?;
        let recorded = self.registry.sandboxes_of(&network).into_iter();
        let mut dropped = Vec::new();
        for sandbox in recorded.filter(|sandbox| !valid.contains(sandbox)) {
            self.registry.delete(&sandbox).await;
            dropped.push((&sandbox).into());
        }
        Ok(dropped)
    }

    pub(super) async fn check(&self, sandbox: &SandboxRef) -> Result<Enrollment, Failure> {
        let record = self.registry.record(sandbox).ok_or_else(|| {
            let message = format!("sandbox {sandbox} is not recorded");
            Failure::new(Reason::SandboxUnknown, message)
        })?;
        if !matches!(record.intent, Intent::Enrolled { .. }) || record.is_detached() {
            return Ok(Enrollment::None);
        }
        let deadline = Instant::now() + QUERY_TIMEOUT;
        let differences = self.clients().verify(&record, deadline).await?.differences;
        if !differences.is_empty() {
            return Err(Failure::new(Reason::RulesDiffer, differences.join("; ")));
        }
        if record.redirection.is_sidecar() {
            return Ok(Enrollment::Sidecar);
        }
        self.check_acknowledged(&record, deadline)
            .await
            .map(|()| Enrollment::Ambient)
    }

    /// Fails unless a ztunnel has acknowledged the sandbox.
    async fn check_acknowledged(&self, record: &Record, deadline: Instant) -> Result<(), Failure> {
        let workloads = self.clients().list_workloads(deadline).await?;
        let reports = clients::ztunnels(&workloads, record);
        if reports
            .iter()
            .any(|report| report.acknowledged_at.is_some())
        {
            return Ok(());
        }
        Err(Failure::new(
            Reason::ZtunnelSilent,
            format!("no ztunnel has acknowledged {}", record.pod),
        ))
    }
}
