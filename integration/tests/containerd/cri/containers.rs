//! The part of `runtime.v1` for containers, numbered as above.

use std::collections::HashMap;

use prost::Message;
use tonic::Status;

use super::{Cri, Empty, ImageSpec, NamespaceOption, PodSandboxConfig};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub(crate) image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    pub(crate) command: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(crate) args: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    pub(crate) mounts: Vec<Mount>,
    /// Relative to the sandbox's log directory.
    #[prost(string, tag = "11")]
    pub(crate) log_path: String,
    #[prost(message, optional, tag = "15")]
    pub(crate) linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(uint32, tag = "2")]
    pub(crate) attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mount {
    #[prost(string, tag = "1")]
    pub(crate) container_path: String,
    #[prost(string, tag = "2")]
    pub(crate) host_path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    pub(crate) security_context: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContainerSecurity {
    #[prost(message, optional, tag = "1")]
    pub(crate) capabilities: Option<Capabilities>,
    #[prost(bool, tag = "2")]
    pub(crate) privileged: bool,
    #[prost(message, optional, tag = "3")]
    pub(crate) namespaces: Option<NamespaceOption>,
    #[prost(message, optional, tag = "5")]
    pub(crate) run_as_user: Option<Number>,
    #[prost(message, optional, tag = "12")]
    pub(crate) run_as_group: Option<Number>,
    #[prost(bool, tag = "7")]
    pub(crate) readonly_rootfs: bool,
    #[prost(bool, tag = "11")]
    pub(crate) no_new_privs: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Capabilities {
    #[prost(string, repeated, tag = "1")]
    pub(crate) add: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) drop: Vec<String>,
}

/// Corresponds to the contract's `Int64Value`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Number {
    #[prost(int64, tag = "1")]
    pub(crate) value: i64,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    sandbox: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

/// CreateContainer's response, and a start's and a status's request.
#[derive(Clone, PartialEq, Message)]
struct ContainerId {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatus {
    #[prost(message, optional, tag = "1")]
    status: Option<Container>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    /// 0: created, 1: running, 2: exited.
    #[prost(int32, tag = "3")]
    pub(crate) state: i32,
    /// In nanoseconds since 1970.
    #[prost(int64, tag = "5")]
    pub(crate) started_at: i64,
    /// In nanoseconds since 1970.
    #[prost(int64, tag = "6")]
    pub(crate) finished_at: i64,
    #[prost(int32, tag = "7")]
    pub(crate) exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    container: String,
    #[prost(string, repeated, tag = "2")]
    command: Vec<String>,
    /// The timeout, in seconds.
    #[prost(int64, tag = "3")]
    timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Executed {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub(crate) exit_code: i32,
}

/// For a command in a container, in seconds.
const EXECUTION: i64 = 20;

impl Cri {
    /// Creates and starts a container; returns its id.
    pub(crate) fn start_container(
        &self,
        sandbox: &str,
        sandbox_config: PodSandboxConfig,
        config: ContainerConfig,
    ) -> Result<String, Status> {
        let request = CreateContainerRequest {
            sandbox: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let method = "/runtime.v1.RuntimeService/CreateContainer";
        let made: ContainerId = self.call(method, request)?;
        let _: Empty = self.of_container("/runtime.v1.RuntimeService/StartContainer", &made.id)?;
        Ok(made.id)
    }

    fn of_container<A: Message + Default + 'static>(
        &self,
        method: &'static str,
        id: &str,
    ) -> Result<A, Status> {
        let (id, verbose) = (id.to_owned(), true);
        self.call(method, ContainerId { id, verbose })
    }

    /// Returns the status with the runtime's verbose information.
    pub(crate) fn container(&self, id: &str) -> Result<(Container, String), Status> {
        let method = "/runtime.v1.RuntimeService/ContainerStatus";
        let mut answer: ContainerStatus = self.of_container(method, id)?;
        let info = answer.info.remove("info").unwrap_or_default();
        Ok((answer.status.unwrap_or_default(), info))
    }

    /// Executes like a kubelet's probe.
    pub(crate) fn execute(&self, container: &str, command: &[&str]) -> Result<Executed, Status> {
        let request = ExecSyncRequest {
            container: container.to_owned(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            timeout: EXECUTION,
        };
        self.call("/runtime.v1.RuntimeService/ExecSync", request)
    }
}
