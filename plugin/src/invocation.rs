//! A runtime's call, parsed: the verb and everything that the spec says comes with it (CNI spec, "CNI operations").

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

/// One call, with what its verb is sure to have.
#[derive(Clone, Debug)]
pub enum Invocation {
    /// ADD.
    Add(Attachment),
    /// DEL.
    Del(Detachment),
    /// CHECK, of what an earlier ADD did.
    Check(Attachment),
    /// GC.
    Gc(Collection),
    /// STATUS.
    Status(NetworkConfig),
    /// VERSION, in the version that was asked.
    Version(SpecVersion),
}

/// A sandbox that joins the network.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// What came on stdin.
    pub config: NetworkConfig,
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// Its netns: absolute; whether it is one is not known yet.
    pub netns: PathBuf,
    /// The pod that the sandbox is for; `None` outside Kubernetes.
    pub pod: Option<NamedPod>,
}

/// A sandbox that leaves the network.
#[derive(Clone, Debug)]
pub struct Detachment {
    /// What came on stdin.
    pub config: NetworkConfig,
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// Its netns, if it still exists: after a reboot, and in the second of a pod's two DELs, there is none.
    pub netns: Option<PathBuf>,
    /// The pod that the sandbox was for. That it cannot be read is no reason to fail: a DEL that fails keeps the runtime
    /// from removing the sandbox, and the sandbox alone says what is to be deleted.
    pub pod: Result<Option<NamedPod>, CniError>,
}

/// The attachments of a network that are alive.
#[derive(Clone, Debug)]
pub struct Collection {
    /// What came on stdin.
    pub config: NetworkConfig,
    /// What is alive; everything else is not.
    pub valid: Vec<ValidAttachment>,
}

impl Invocation {
    /// Parses a call.
    ///
    /// # Errors
    ///
    /// Code 4 naming the variables, or those of [`NetworkConfig::parse`].
    pub fn parse(variables: &Variables, stdin: &[u8]) -> Result<Self, CniError> {
        let verb = variables.verb()?;
        if verb == Verb::Version {
            // Before 1.0.0 nothing came on stdin, and the answer is what a runtime needs to do better.
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

    /// What came on stdin; VERSION needs nothing of it.
    pub fn config(&self) -> Option<&NetworkConfig> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.config),
            Self::Del(call) => Some(&call.config),
            Self::Gc(call) => Some(&call.config),
            Self::Status(config) => Some(config),
            Self::Version(_) => None,
        }
    }

    /// The sandbox that the call is for, where it is for one.
    pub fn sandbox(&self) -> Option<&SandboxRef> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.sandbox),
            Self::Del(call) => Some(&call.sandbox),
            Self::Gc(_) | Self::Status(_) | Self::Version(_) => None,
        }
    }

    /// The pod that the call is for, where it is for one.
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
    /// An absent list is no empty one: the latter says that nothing is alive.
    fn new(mut config: NetworkConfig) -> Result<Self, CniError> {
        let missing = || CniError::in_config("cni.dev/valid-attachments", "is missing");
        let valid = config.valid_attachments.take().ok_or_else(missing)?;
        Ok(Self { config, valid })
    }
}

#[cfg(test)]
mod tests;
