//! The network configuration on stdin (CNI spec, "Plugin configuration objects" and "Deriving execution configuration").

use std::{path::PathBuf, time::Duration};

use inpod_types::{ContainerId, IfName, NamespaceName, NetworkName};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::{
    error::{CniError, ErrorCode},
    version::SpecVersion,
};

/// The most bytes of configuration that are read.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// `timeoutSeconds` lies in 1 to this.
const MAX_TIMEOUT_SECONDS: u64 = 600;

/// What a runtime says on stdin, as far as the plugin needs it. Unknown keys are ignored, as the spec allows and runtimes
/// that add keys of their own demand.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// `cniVersion`: the version of the spec to answer in.
    pub version: SpecVersion,
    /// `name`: the network's name; never empty.
    pub name: NetworkName,
    /// `type`: the name that this executable was found by.
    pub plugin_type: String,
    /// `prevResult`, untouched, to be passed on byte for byte. Later DELs have none.
    pub prev_result: Option<Box<RawValue>>,
    /// `cni.dev/valid-attachments`, which only GC has.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    /// The plugin's own keys.
    pub settings: Settings,
}

/// The plugin's own keys of its entry in the conflist.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `agentSocket`: where `pod-events` listens.
    pub agent_socket: PathBuf,
    /// `stateDir`: what the plugin shares with `pod-events` on disk.
    pub state_dir: PathBuf,
    /// `timeoutSeconds`: how long a call may take from the start of the process.
    pub timeout: Duration,
    /// `excludeNamespaces`: pods of these pass at once.
    pub exclude_namespaces: Vec<NamespaceName>,
    /// `defaultNamespace`: where pods are that a runtime names without a namespace, as podman does. Without it they are
    /// no pods.
    pub default_namespace: Option<NamespaceName>,
    /// `agentUnavailable`.
    pub agent_unavailable: AgentUnavailable,
    /// `logLevel`: the least grave lines that are written to stderr.
    pub log_level: Level,
}

/// What becomes of an ADD for a pod of an enrolled namespace while the agent is away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AgentUnavailable {
    /// It fails, and the runtime repeats it: no pod of the mesh starts outside it.
    #[default]
    Fail,
    /// It is admitted outside the mesh, and written down for `pod-events` to repair.
    Allow,
}

/// How grave a log line is, the gravest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// An operator must act.
    Error,
    /// Degraded; somebody will try again.
    Warn,
    /// What happened to a pod.
    #[default]
    Info,
    /// What was passed on untouched.
    Debug,
    /// The same as debug: accepted because other components know it.
    Trace,
}

/// One attachment that is alive (CNI spec, "GC").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidAttachment {
    /// `containerID`.
    pub container_id: ContainerId,
    /// `ifname`.
    pub ifname: IfName,
}

/// The keys that are read, each kept as text so that an error can name the key.
#[derive(Deserialize)]
struct Document<'a> {
    #[serde(borrow, rename = "cniVersion")]
    version: Option<&'a RawValue>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow, rename = "type")]
    plugin_type: Option<&'a RawValue>,
    #[serde(borrow, rename = "prevResult")]
    prev_result: Option<&'a RawValue>,
    #[serde(borrow, rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<&'a RawValue>,
    #[serde(borrow, rename = "agentSocket")]
    agent_socket: Option<&'a RawValue>,
    #[serde(borrow, rename = "stateDir")]
    state_dir: Option<&'a RawValue>,
    #[serde(borrow, rename = "timeoutSeconds")]
    timeout_seconds: Option<&'a RawValue>,
    #[serde(borrow, rename = "excludeNamespaces")]
    exclude_namespaces: Option<&'a RawValue>,
    #[serde(borrow, rename = "defaultNamespace")]
    default_namespace: Option<&'a RawValue>,
    #[serde(borrow, rename = "agentUnavailable")]
    agent_unavailable: Option<&'a RawValue>,
    #[serde(borrow, rename = "logLevel")]
    log_level: Option<&'a RawValue>,
}

impl NetworkConfig {
    /// Parses what came on stdin.
    ///
    /// # Errors
    ///
    /// Code 6 when it is no JSON object, 1 when its version is not spoken, 7 when a key that is needed is missing or
    /// holds what it may not; the message names the key.
    pub fn parse(stdin: &[u8]) -> Result<Self, CniError> {
        let document = Document::parse(stdin)?;
        // The version first: in another one the rest may mean something else.
        let version: String = parse_key("cniVersion", document.version)?.unwrap_or_default();
        Ok(Self {
            version: version.parse()?,
            name: document.name()?,
            plugin_type: require("type", document.plugin_type)?,
            prev_result: document.prev_result()?,
            valid_attachments: document.valid_attachments()?,
            settings: document.settings()?,
        })
    }
}

impl Settings {
    /// Whether pods of a namespace pass at once.
    pub fn excludes(&self, namespace: &NamespaceName) -> bool {
        self.exclude_namespaces.contains(namespace)
    }
}

impl<'a> Document<'a> {
    fn parse(stdin: &'a [u8]) -> Result<Self, CniError> {
        let decode_error = |problem: String| {
            let msg = format!("the network configuration on stdin is no JSON object: {problem}");
            CniError::new(ErrorCode::Decode, msg)
        };
        // serde would read an array, too, its elements as the fields in order.
        match stdin.trim_ascii_start().first() {
            Some(b'{') => {}
            Some(_) => return Err(decode_error("it does not begin with '{'".to_owned())),
            None => return Err(decode_error("it is empty".to_owned())),
        }
        serde_json::from_slice(stdin).map_err(|error| decode_error(error.to_string()))
    }

    fn name(&self) -> Result<NetworkName, CniError> {
        let name: String = require("name", self.name)?;
        if name.is_empty() {
            return Err(CniError::in_config("name", "is empty"));
        }
        parse_identifier("name", &name)
    }

    fn prev_result(&self) -> Result<Option<Box<RawValue>>, CniError> {
        match self.prev_result {
            Some(raw) if !raw.get().starts_with('{') => {
                Err(CniError::in_config("prevResult", "expected an object"))
            }
            other => Ok(other.map(ToOwned::to_owned)),
        }
    }

    fn valid_attachments(&self) -> Result<Option<Vec<ValidAttachment>>, CniError> {
        #[derive(Deserialize)]
        struct Item {
            #[serde(rename = "containerID")]
            container_id: String,
            ifname: String,
        }
        const KEY: &str = "cni.dev/valid-attachments";
        let items: Option<Vec<Item>> = parse_key(KEY, self.valid_attachments)?;
        let check = |item: Item| {
            Ok(ValidAttachment {
                container_id: parse_identifier(KEY, &item.container_id)?,
                ifname: parse_identifier(KEY, &item.ifname)?,
            })
        };
        items
            .map(|items| items.into_iter().map(check).collect())
            .transpose()
    }

    fn settings(&self) -> Result<Settings, CniError> {
        Ok(Settings {
            agent_socket: self.agent_socket()?,
            state_dir: parse_path("stateDir", self.state_dir, "/var/lib/inpod/plugin")?,
            timeout: self.timeout()?,
            exclude_namespaces: self.exclude_namespaces()?,
            default_namespace: self.default_namespace()?,
            agent_unavailable: parse_key("agentUnavailable", self.agent_unavailable)?
                .unwrap_or_default(),
            log_level: parse_key("logLevel", self.log_level)?.unwrap_or_default(),
        })
    }

    fn agent_socket(&self) -> Result<PathBuf, CniError> {
        const KEY: &str = "agentSocket";
        let socket = parse_path(KEY, self.agent_socket, "/run/inpod/pod-events/grpc.sock")?;
        // unix(7): sun_path holds 108 bytes, the last one a zero.
        if socket.as_os_str().len() > 107 {
            return Err(CniError::in_config(KEY, "is longer than 107 bytes"));
        }
        Ok(socket)
    }

    fn timeout(&self) -> Result<Duration, CniError> {
        const KEY: &str = "timeoutSeconds";
        let seconds = parse_key(KEY, self.timeout_seconds)?.unwrap_or(30);
        if !(1..=MAX_TIMEOUT_SECONDS).contains(&seconds) {
            let problem = format_args!("{seconds} is not in 1 to {MAX_TIMEOUT_SECONDS}");
            return Err(CniError::in_config(KEY, problem));
        }
        Ok(Duration::from_secs(seconds))
    }

    fn exclude_namespaces(&self) -> Result<Vec<NamespaceName>, CniError> {
        const KEY: &str = "excludeNamespaces";
        let names: Vec<String> = parse_key(KEY, self.exclude_namespaces)?.unwrap_or_default();
        names
            .iter()
            .map(|name| parse_identifier(KEY, name))
            .collect()
    }

    fn default_namespace(&self) -> Result<Option<NamespaceName>, CniError> {
        const KEY: &str = "defaultNamespace";
        let name: Option<String> = parse_key(KEY, self.default_namespace)?;
        name.map(|name| parse_identifier(KEY, &name)).transpose()
    }
}

/// Reads a key's value; `null` is as good as no key.
fn parse_key<T: DeserializeOwned>(
    name: &str,
    raw: Option<&RawValue>,
) -> Result<Option<T>, CniError> {
    raw.map(|raw| serde_json::from_str(raw.get()))
        .transpose()
        .map_err(|error| CniError::in_config(name, error))
}

fn require<T: DeserializeOwned>(name: &str, raw: Option<&RawValue>) -> Result<T, CniError> {
    parse_key(name, raw)?.ok_or_else(|| CniError::in_config(name, "is missing"))
}

fn parse_identifier<T>(name: &str, text: &str) -> Result<T, CniError>
where
    T: std::str::FromStr<Err = inpod_types::InvalidIdentifier>,
{
    text.parse()
        .map_err(|error| CniError::in_config(name, error))
}

/// An absolute path: the plugin's working directory is the runtime's.
fn parse_path(name: &str, raw: Option<&RawValue>, default: &str) -> Result<PathBuf, CniError> {
    let text: String = parse_key(name, raw)?.unwrap_or_else(|| default.to_owned());
    if !text.starts_with('/') || text.contains('\0') {
        return Err(CniError::in_config(name, "expected an absolute path"));
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests;
