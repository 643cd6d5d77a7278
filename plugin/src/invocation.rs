//! A parsed call with the parameters that the spec requires for each verb (CNI spec, "CNI operations").

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

#[derive(Clone, Debug)]
pub enum Invocation {
    Add(Attachment),
    Del(Detachment),
    Check(Attachment),
    Gc(Collection),
    Status(NetworkConfig),
    Version(SpecVersion),
}

#[derive(Clone, Debug)]
pub struct Attachment {
    pub config: NetworkConfig,
    pub sandbox: SandboxRef,
    /// An absolute path, not yet verified to lead to a netns.
    pub netns: PathBuf,
    /// The pod, or `None` for a sandbox outside Kubernetes.
    pub pod: Option<NamedPod>,
}

#[derive(Clone, Debug)]
pub struct Detachment {
    pub config: NetworkConfig,
    pub sandbox: SandboxRef,
    /// The netns, which is missing in a DEL after a reboot and in the second of a pod's two DELs.
    pub netns: Option<PathBuf>,
    /// An error in `CNI_ARGS` must not fail the DEL, because the runtime could then not remove the sandbox. The sandbox
    /// alone identifies the state to delete.
    pub pod: Result<Option<NamedPod>, CniError>,
}

#[derive(Clone, Debug)]
pub struct Collection {
    pub config: NetworkConfig,
    /// The attachments in use, so that all others are garbage.
    pub valid: Vec<ValidAttachment>,
}

impl Invocation {
    pub fn parse(variables: &Variables, stdin: &[u8]) -> Result<Self, CniError> {
        let verb = variables.verb()?;
        if verb == Verb::Version {
            // Before spec 1.0.0, VERSION had no input; the answer lets the runtime choose a version.
            return Ok(Self::Version(choose_report_version(stdin)));
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

    pub fn config(&self) -> Option<&NetworkConfig> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.config),
            Self::Del(call) => Some(&call.config),
            Self::Gc(call) => Some(&call.config),
            Self::Status(config) => Some(config),
            Self::Version(_) => None,
        }
    }

    pub fn sandbox(&self) -> Option<&SandboxRef> {
        match self {
            Self::Add(call) | Self::Check(call) => Some(&call.sandbox),
            Self::Del(call) => Some(&call.sandbox),
            Self::Gc(_) | Self::Status(_) | Self::Version(_) => None,
        }
    }

    pub fn pod(&self) -> Option<&NamedPod> {
        match self {
            Self::Add(call) | Self::Check(call) => call.pod.as_ref(),
            Self::Del(call) => call.pod.as_ref().ok().and_then(Option::as_ref),
            Self::Gc(_) | Self::Status(_) | Self::Version(_) => None,
        }
    }
}

/// Chooses the newest version for a stdin of 0.1.0 or without a version, because 0.1.0 has no VERSION. Plugins in Go
/// report the newest version for every stdin.
fn choose_report_version(stdin: &[u8]) -> SpecVersion {
    let requested = SpecVersion::for_reply(stdin);
    if requested < Verb::Version.since() {
        return SpecVersion::NEWEST;
    }
    requested
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
    /// Rejects a missing list, because an empty list declares every attachment garbage.
    fn new(mut config: NetworkConfig) -> Result<Self, CniError> {
        let missing = || CniError::in_config("cni.dev/valid-attachments", "is missing");
        let valid = config.valid_attachments.take().ok_or_else(missing)?;
        Ok(Self { config, valid })
    }
}

#[cfg(test)]
mod tests;
