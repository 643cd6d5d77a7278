//! Parsed calls: the verb and the parameters that the spec requires for it (CNI spec, "CNI operations").

mod variables;
mod verb;

use std::path::PathBuf;

use inpod_types::SandboxRef;

pub use self::{variables::Variables, verb::Verb};
use crate::{
    args::NamedPod,
    config::{NetworkConfig, ValidAttachment},
    error::CniError,
    version::SpecVersion,
};

/// One call with the parameters of its verb.
#[derive(Clone, Debug)]
pub enum Invocation {
    Add(Attachment),
    Del(Detachment),
    Check(Attachment),
    Gc(Collection),
    Status(NetworkConfig),
    /// VERSION, with the version of the reply.
    Version(SpecVersion),
}

/// A sandbox that joins the network.
#[derive(Clone, Debug)]
pub struct Attachment {
    pub config: NetworkConfig,
    pub sandbox: SandboxRef,
    /// Absolute path; not yet verified to be a netns.
    pub netns: PathBuf,
    /// The sandbox's pod; `None` outside Kubernetes.
    pub pod: Option<NamedPod>,
}

/// A sandbox that leaves the network.
#[derive(Clone, Debug)]
pub struct Detachment {
    pub config: NetworkConfig,
    pub sandbox: SandboxRef,
    /// Path of the netns, if it still exists: a DEL after a reboot and the second of a pod's two DELs have none.
    pub netns: Option<PathBuf>,
    /// The sandbox's pod. An error here must not fail the call: a failing DEL keeps the runtime from removing the
    /// sandbox, and the sandbox alone identifies what to delete.
    pub pod: Result<Option<NamedPod>, CniError>,
}

/// The attachments of a network that are in use.
#[derive(Clone, Debug)]
pub struct Collection {
    pub config: NetworkConfig,
    /// Attachments in use; all others are garbage.
    pub valid: Vec<ValidAttachment>,
}

impl Invocation {
    /// Parses a call from the environment and stdin.
    ///
    /// # Errors
    ///
    /// Code 4, naming the variables, or those of [`NetworkConfig::parse`].
    pub fn parse(variables: &Variables, stdin: &[u8]) -> Result<Self, CniError> {
        let verb = variables.verb()?;
        if verb == Verb::Version {
            // Before spec 1.0.0, VERSION had no input; answering helps the runtime to choose a version.
            return Ok(Self::Version(SpecVersion::for_reply(stdin)));
        }
        let config = NetworkConfig::parse(stdin)?;
        verb.require_version(config.version)?;
        match verb {
            Verb::Add => Attachment::new(variables, config).map(Self::Add),
            Verb::Check => Attachment::new(variables, config).map(Self::Check),
            Verb::Del => Detachment::new(variables, config).map(Self::Del),
            Verb::Gc => Collection::new(config).map(Self::Gc),
            Verb::Status => Ok(Self::Status(config)),
            Verb::Version => Ok(Self::Version(config.version)),
        }
    }

    /// Returns the network configuration; VERSION has none.
    pub fn config(&self) -> Option<&NetworkConfig> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.config),
            Self::Del(call) => Some(&call.config),
            Self::Gc(call) => Some(&call.config),
            Self::Status(config) => Some(config),
            Self::Version(_) => None,
        }
    }

    /// Returns the sandbox of the call, if it is for one.
    pub fn sandbox(&self) -> Option<&SandboxRef> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.sandbox),
            Self::Del(call) => Some(&call.sandbox),
            Self::Gc(_) | Self::Status(_) | Self::Version(_) => None,
        }
    }

    /// Returns the pod of the call, if it is for one.
    pub fn pod(&self) -> Option<&NamedPod> {
        match self {
            Self::Add(call) | Self::Check(call) => call.pod.as_ref(),
            Self::Del(call) => call.pod.as_ref().ok().and_then(Option::as_ref),
            Self::Gc(_) | Self::Status(_) | Self::Version(_) => None,
        }
    }
}

impl Attachment {
    fn new(variables: &Variables, config: NetworkConfig) -> Result<Self, CniError> {
        variables.require(&["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"])?;
        Ok(Self {
            sandbox: variables.sandbox(&config)?,
            netns: variables.netns()?,
            pod: variables.pod(&config)?,
            config,
        })
    }
}

impl Detachment {
    fn new(variables: &Variables, config: NetworkConfig) -> Result<Self, CniError> {
        variables.require(&["CNI_CONTAINERID", "CNI_IFNAME"])?;
        Ok(Self {
            sandbox: variables.sandbox(&config)?,
            netns: variables.netns.as_ref().map(PathBuf::from),
            pod: variables.pod(&config),
            config,
        })
    }
}

impl Collection {
    /// A missing list is an error, since an empty one declares every attachment garbage.
    fn new(mut config: NetworkConfig) -> Result<Self, CniError> {
        let missing = || CniError::in_config("cni.dev/valid-attachments", "is missing");
        let valid = config.valid_attachments.take().ok_or_else(missing)?;
        Ok(Self { config, valid })
    }
}

#[cfg(test)]
mod tests;
