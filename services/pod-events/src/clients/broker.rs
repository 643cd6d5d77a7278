use std::collections::BTreeSet;

use inpod_proto::{podevents::v1 as wire, types::v1 as types, ztunnelbroker::v1 as broker};
use inpod_types::{Failure, PodUid, Revision, SandboxRef, Workload};
use tokio::time::Instant;
use tonic::Streaming;

use super::{Broker, Clients, to_result};
use crate::checkpoint::Record;

impl Clients {
    /// Adds a workload; returns once the first ztunnel has acknowledged the workload.
    pub async fn add_workload(
        &self,
        instance_id: &str,
        workload: &Workload,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let message = broker::AddWorkloadRequest {
            instance_id: instance_id.to_owned(),
            workload: Some(workload.into()),
        };
        self.broker(Broker::add_workload, message, deadline).await?;
        Ok(())
    }

    /// Removes a workload. The call succeeds even if the workload is unknown.
    pub async fn remove_workload(
        &self,
        instance_id: &str,
        sandbox: &SandboxRef,
        revision: Revision,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let message = broker::RemoveWorkloadRequest {
            instance_id: instance_id.to_owned(),
            sandbox: Some(sandbox.into()),
            revision: revision.0,
        };
        self.broker(Broker::remove_workload, message, deadline)
            .await?;
        Ok(())
    }

    pub async fn set_workloads(
        &self,
        instance_id: &str,
        revision: Revision,
        workloads: &[Workload],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let message = broker::SetWorkloadsRequest {
            instance_id: instance_id.to_owned(),
            revision: revision.0,
            workloads: workloads.iter().map(Into::into).collect(),
        };
        self.broker(Broker::set_workloads, message, deadline)
            .await?;
        Ok(())
    }

    pub async fn set_ztunnels(
        &self,
        instance_id: &str,
        pods: &BTreeSet<PodUid>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let message = broker::SetZtunnelsRequest {
            instance_id: instance_id.to_owned(),
            pod_uids: pods.iter().map(|uid| uid.as_str().to_owned()).collect(),
        };
        self.broker(Broker::set_ztunnels, message, deadline).await?;
        Ok(())
    }

    /// Lists the broker's desired set and each ztunnel's report on the set.
    pub async fn list_workloads(
        &self,
        deadline: Instant,
    ) -> Result<broker::ListWorkloadsResponse, Failure> {
        let message = broker::ListWorkloadsRequest {};
        self.broker(Broker::list_workloads, message, deadline).await
    }

    pub async fn watch_sessions(
        &self,
    ) -> Result<Streaming<broker::WatchSessionsResponse>, Failure> {
        let mut client = self.broker.clone();
        let answer = client.watch_sessions(broker::WatchSessionsRequest {}).await;
        to_result("ztunnel-broker", answer)
    }
}

/// Returns the report of each ztunnel on a sandbox.
pub(crate) fn ztunnels(
    all: &broker::ListWorkloadsResponse,
    record: &Record,
) -> Vec<wire::ZtunnelReport> {
    let sandbox = types::SandboxRef::from(&record.sandbox);
    let states = all.workloads.iter().flat_map(|workload| &workload.states);
    let own = states.filter(|state| state.sandbox.as_ref() == Some(&sandbox));
    own.map(|state| wire::ZtunnelReport {
        session_id: state.session_id,
        state: describe_phase(state.phase()),
        acknowledged_at: state.acknowledged_at,
        error: state.error.clone(),
    })
    .collect()
}

fn describe_phase(phase: broker::WorkloadPhase) -> String {
    if phase == broker::WorkloadPhase::Unspecified {
        return "unknown".to_owned();
    }
    let name = phase.as_str_name();
    name.trim_start_matches("WORKLOAD_PHASE_").to_lowercase()
}
