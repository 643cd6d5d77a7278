//! CRI client: the part of `runtime.v1` that a kubelet needs for sandboxes. Field numbers are those of Kubernetes'
//! `cri-api`; the published crate needs `protoc` to build.

use std::{collections::HashMap, path::Path, time::Duration};

use prost::Message;
use tokio::runtime::Runtime;
use tonic::{Request, Status, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<Metadata>,
    #[prost(string, tag = "3")]
    pub(crate) log_directory: String,
    #[prost(message, repeated, tag = "5")]
    pub(crate) port_mappings: Vec<PortMapping>,
    #[prost(message, optional, tag = "8")]
    pub(crate) linux: Option<Linux>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Metadata {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) uid: String,
    #[prost(string, tag = "3")]
    pub(crate) namespace: String,
    #[prost(uint32, tag = "4")]
    pub(crate) attempt: u32,
}

/// On every address of the node.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PortMapping {
    #[prost(int32, tag = "2")]
    pub(crate) container_port: i32,
    #[prost(int32, tag = "3")]
    pub(crate) host_port: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Linux {
    #[prost(string, tag = "1")]
    pub(crate) cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) security_context: Option<SecurityContext>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SecurityContext {
    #[prost(message, optional, tag = "1")]
    pub(crate) namespaces: Option<NamespaceOption>,
}

/// The owners of a sandbox's namespaces.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct NamespaceOption {
    /// 0: the pod's own, 2: the node's.
    #[prost(int32, tag = "1")]
    pub(crate) network: i32,
    /// 0: the pod's, 1: each container's own.
    #[prost(int32, tag = "2")]
    pub(crate) pid: i32,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
}

/// RunPodSandbox's response, and the request of a stop, a removal and a status.
#[derive(Clone, PartialEq, Message)]
struct SandboxId {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxStatus {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<Sandbox>,
    #[prost(map = "string, string", tag = "2")]
    pub(crate) info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Sandbox {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) metadata: Option<Metadata>,
    /// 0: ready, 1: not ready.
    #[prost(int32, tag = "3")]
    pub(crate) state: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Sandboxes {
    #[prost(message, repeated, tag = "1")]
    items: Vec<Sandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<RuntimeStatus>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    conditions: Vec<Condition>,
}

#[derive(Clone, PartialEq, Message)]
struct Condition {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(bool, tag = "2")]
    status: bool,
}

#[derive(Clone, PartialEq, Message)]
struct ImageStatusRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageSpec {
    #[prost(string, tag = "1")]
    pub(crate) image: String,
}

#[derive(Clone, PartialEq, Message)]
struct ImageStatusResponse {
    #[prost(message, optional, tag = "1")]
    image: Option<Empty>,
}

#[derive(Debug)]
pub(crate) struct Cri {
    runtime: Runtime,
    channel: Channel,
    timeout: Duration,
}

impl Cri {
    pub(crate) fn new(socket: &Path) -> anyhow::Result<Self> {
        let runtime = Runtime::new()?;
        let channel = {
            let _context = runtime.enter();
            inpod_service::channel(socket)
        };
        // A kubelet's default is two minutes.
        let timeout = Duration::from_secs(60);
        Ok(Self {
            runtime,
            channel,
            timeout,
        })
    }

    pub(crate) fn patient_for(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    fn call<Q, A>(&self, method: &'static str, question: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut client = Grpc::new(self.channel.clone());
        let mut request = Request::new(question);
        request.set_timeout(self.timeout);
        self.runtime.block_on(async {
            let ready = client.ready().await;
            ready.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = tonic_prost::ProstCodec::default();
            let path = PathAndQuery::from_static(method);
            Ok(client.unary(request, path, codec).await?.into_inner())
        })
    }

    fn of<A: Message + Default + 'static>(
        &self,
        method: &'static str,
        id: &str,
    ) -> Result<A, Status> {
        let (id, verbose) = (id.to_owned(), true);
        self.call(method, SandboxId { id, verbose })
    }

    pub(crate) fn run(&self, config: PodSandboxConfig) -> Result<String, Status> {
        let config = Some(config);
        let method = "/runtime.v1.RuntimeService/RunPodSandbox";
        let answer: SandboxId = self.call(method, RunPodSandboxRequest { config })?;
        Ok(answer.id)
    }

    pub(crate) fn stop(&self, id: &str) -> Result<(), Status> {
        let _: Empty = self.of("/runtime.v1.RuntimeService/StopPodSandbox", id)?;
        Ok(())
    }

    pub(crate) fn remove(&self, id: &str) -> Result<(), Status> {
        let _: Empty = self.of("/runtime.v1.RuntimeService/RemovePodSandbox", id)?;
        Ok(())
    }

    pub(crate) fn status(&self, id: &str) -> Result<SandboxStatus, Status> {
        self.of("/runtime.v1.RuntimeService/PodSandboxStatus", id)
    }

    pub(crate) fn sandboxes(&self) -> Result<Vec<Sandbox>, Status> {
        let method = "/runtime.v1.RuntimeService/ListPodSandbox";
        let list: Sandboxes = self.call(method, Empty {})?;
        Ok(list.items)
    }

    /// The kind is `RuntimeReady` or `NetworkReady`.
    pub(crate) fn condition(&self, kind: &str) -> Result<bool, Status> {
        let method = "/runtime.v1.RuntimeService/Status";
        let answer: StatusResponse = self.call(method, StatusRequest { verbose: false })?;
        let conditions = answer.status.unwrap_or_default().conditions;
        Ok(conditions
            .iter()
            .any(|condition| condition.kind == kind && condition.status))
    }

    pub(crate) fn lists(&self) -> Result<String, Status> {
        let method = "/runtime.v1.RuntimeService/Status";
        let mut answer: StatusResponse = self.call(method, StatusRequest { verbose: true })?;
        Ok(answer.info.remove("cniconfig").unwrap_or_default())
    }

    pub(crate) fn has_image(&self, name: &str) -> Result<bool, Status> {
        let image = Some(ImageSpec { image: name.into() });
        let method = "/runtime.v1.ImageService/ImageStatus";
        let answer: ImageStatusResponse = self.call(method, ImageStatusRequest { image })?;
        Ok(answer.image.is_some())
    }
}
