use std::{path::Path, time::Duration};

use anyhow::Context as _;
use inpod_proto::{
    netconfig::v1::{self as netconfig, netconfig_service_client::NetconfigServiceClient},
    podevents::v1::{self as pod_events, pod_events_service_client::PodEventsServiceClient},
    types::v1 as types,
    ztunnelbroker::v1::{
        self as broker, ztunnel_broker_service_client::ZtunnelBrokerServiceClient,
    },
};
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status, transport::Channel};

/// A client of the services of a node, like grpcurl.
#[derive(Debug)]
pub struct Api {
    runtime: Runtime,
    pod_events: PodEventsServiceClient<Channel>,
    netconfig: NetconfigServiceClient<Channel>,
    broker: ZtunnelBrokerServiceClient<Channel>,
}

fn asked<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(10));
    request
}

impl Api {
    pub fn new(run_dir: &Path) -> anyhow::Result<Self> {
        let runtime = Runtime::new().context("no runtime")?;
        let _context = runtime.enter();
        let channel =
            |component| inpod_service::channel(&inpod_service::socket(run_dir, component));
        Ok(Self {
            pod_events: PodEventsServiceClient::new(channel("pod-events")),
            netconfig: NetconfigServiceClient::new(channel("netconfig")),
            broker: ZtunnelBrokerServiceClient::new(channel("ztunnel-broker")),
            runtime,
        })
    }

    fn wait<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> anyhow::Result<T> {
        Ok(self.runtime.block_on(call)?.into_inner())
    }

    pub fn explain(
        &self,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<pod_events::ExplainPodResponse> {
        let selector = types::PodSelector {
            namespace: namespace.into(),
            name: name.into(),
            uid: String::new(),
        };
        let mut client = self.pod_events.clone();
        self.wait(client.explain_pod(asked(pod_events::ExplainPodRequest {
            pod: Some(selector),
        })))
    }

    pub fn list(
        &self,
        filter: pod_events::ListPodsRequest,
    ) -> anyhow::Result<Vec<pod_events::PodSummary>> {
        let mut client = self.pod_events.clone();
        let listed = self.wait(client.list_pods(asked(filter)))?;
        Ok(listed.pods)
    }

    pub fn binds(
        &self,
        filter: pod_events::ListBindsRequest,
    ) -> anyhow::Result<Vec<pod_events::PodBinds>> {
        let mut client = self.pod_events.clone();
        let listed = self.wait(client.list_binds(asked(filter)))?;
        Ok(listed.pods)
    }

    pub fn status(&self) -> anyhow::Result<pod_events::GetStatusResponse> {
        let mut client = self.pod_events.clone();
        self.wait(client.get_status(asked(pod_events::GetStatusRequest {})))
    }

    pub fn check(
        &self,
        sandbox: types::SandboxRef,
    ) -> anyhow::Result<pod_events::CheckPodResponse> {
        let mut client = self.pod_events.clone();
        self.wait(client.check_pod(asked(pod_events::CheckPodRequest {
            sandbox: Some(sandbox),
        })))
    }

    pub fn collect(&self, network: &str, valid: &[&str]) -> anyhow::Result<Vec<String>> {
        let valid = valid.iter().map(|id| pod_events::Attachment {
            container_id: (*id).into(),
            ifname: "eth0".into(),
        });
        let message = pod_events::CollectGarbageRequest {
            network_name: network.into(),
            valid_attachments: valid.collect(),
        };
        let mut client = self.pod_events.clone();
        let dropped = self.wait(client.collect_garbage(asked(message)))?.dropped;
        Ok(dropped
            .into_iter()
            .map(|sandbox| sandbox.container_id)
            .collect())
    }

    pub fn claims(&self) -> anyhow::Result<Vec<netconfig::Claim>> {
        let mut client = self.netconfig.clone();
        Ok(self
            .wait(client.list_claims(asked(netconfig::ListClaimsRequest {})))?
            .claims)
    }

    /// Has pod-events verify every pod; drift is repaired when the call returns.
    pub fn resync(&self) -> anyhow::Result<pod_events::ResyncResponse> {
        let mut client = self.pod_events.clone();
        self.wait(client.resync(asked(pod_events::ResyncRequest { pod: None })))
    }

    /// Has netconfig remove its rules from the node's own network.
    pub fn leave_node(&self) -> anyhow::Result<netconfig::LeaveNodeResponse> {
        let mut client = self.netconfig.clone();
        self.wait(client.leave_node(asked(netconfig::LeaveNodeRequest {})))
    }

    pub fn workloads(&self) -> anyhow::Result<broker::ListWorkloadsResponse> {
        let mut client = self.broker.clone();
        self.wait(client.list_workloads(asked(broker::ListWorkloadsRequest {})))
    }
}
