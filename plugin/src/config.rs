//! Parses the network configuration on stdin (CNI spec, "Plugin configuration objects" and "Deriving execution
//! configuration from plugin configuration").

use std::{path::PathBuf, time::Duration};

use inpod_types::{ContainerId, IfName, NamespaceName, NetworkName};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::{
    error::{CniError, ErrorCode},
    version::SpecVersion,
};

pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// The default of `stateDir`.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/inpod/plugin";

const MAX_TIMEOUT_SECONDS: u64 = 600;

/// The keys read by the plugin. Unknown keys are ignored, because the spec allows them and runtimes add some of their
/// own.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    pub version: SpecVersion,
    pub name: NetworkName,
    pub plugin_type: String,
    /// `prevResult`, passed on byte for byte. A repeated DEL has none.
    pub prev_result: Option<Box<RawValue>>,
    /// `cni.dev/valid-attachments`, a list that only GC has.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    pub settings: Settings,
}

/// The plugin's own keys, set by an operator in the conflist entry.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `agentSocket`: the path of the Unix socket on which `pod-events` serves gRPC.
    pub agent_socket: PathBuf,
    /// `stateDir`: the directory for files shared with `pod-events`, such as spool and kill switch.
    pub state_dir: PathBuf,
    /// `timeoutSeconds`: the time for the whole call, from the start of the process.
    pub timeout: Duration,
    /// `excludeNamespaces`: namespaces whose pods are never enrolled, so that the plugin skips their calls.
    pub exclude_namespaces: Vec<NamespaceName>,
    /// `defaultNamespace`: the namespace of pods that have none (podman). If unset, such calls are not for a pod.
    pub default_namespace: Option<NamespaceName>,
    pub agent_unavailable: AgentUnavailable,
    /// `logLevel`: the least severe level that the plugin still writes to stderr.
    pub log_level: Level,
}

/// Decides ADDs for enrolled namespaces while the agent is unreachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AgentUnavailable {
    /// Fails the ADD, which the runtime retries, so that no pod of the mesh starts outside the mesh.
    #[default]
    Fail,
    /// Starts the pod unenrolled and spools the ADD, so that `pod-events` can enroll the pod later.
    Allow,
}

/// The levels of log lines, with the most severe level first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// A problem on which an operator must act.
    Error,
    /// A degraded state that a later retry resolves without an operator.
    Warn,
    /// A normal event: a pod was added, deleted or checked.
    #[default]
    Info,
    /// A call that the plugin passed through without touching the pod.
    Debug,
    /// A synonym of debug, accepted because the other components accept this level.
    Trace,
}

/// An attachment in use, which a GC must keep (CNI spec, "GC").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidAttachment {
    pub container_id: ContainerId,
    pub ifname: IfName,
}

/// Keeps the values raw, so that an error can name the key of an invalid value.
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
    /// Parses and validates the configuration that the runtime wrote to stdin.
    ///
    /// # Errors
    ///
    /// Fails with code 6 if stdin is not a JSON object, with code 1 for an unsupported version, and with code 7 for a
    /// missing or invalid key, named in the message.
    pub fn parse(stdin: &[u8]) -> Result<Self, CniError> {
        let document = Document::parse(stdin)?;
        // The version goes first, because keys may have another meaning in another version.
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
    pub fn excludes(&self, namespace: &NamespaceName) -> bool {
        self.exclude_namespaces.contains(namespace)
    }
}

impl<'a> Document<'a> {
    fn parse(stdin: &'a [u8]) -> Result<Self, CniError> {
        let decode_error = |problem: String| {
            let msg = format!("the network configuration on stdin is not a JSON object: {problem}");
            CniError::new(ErrorCode::Decode, msg)
        };
        // serde would accept an array of the fields instead of an object, too.
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
            state_dir: parse_path("stateDir", self.state_dir, DEFAULT_STATE_DIR)?,
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
        // `sun_path` holds 108 bytes, including the final NUL (unix(7)).
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

/// Parses the value of a key, and treats `null` as absent.
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

/// Requires an absolute path, because the runtime chooses the working directory.
fn parse_path(name: &str, raw: Option<&RawValue>, default: &str) -> Result<PathBuf, CniError> {
    let text: String = parse_key(name, raw)?.unwrap_or_else(|| default.to_owned());
    if !text.starts_with('/') || text.contains('\0') {
        return Err(CniError::in_config(name, "expected an absolute path"));
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests;
