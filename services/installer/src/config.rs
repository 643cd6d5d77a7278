use std::{
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{directory::below, is_loaded};
use inpod_service::Key;
use inpod_types::NamespaceName;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IntoDeserializer as _, value::StringDeserializer},
};

use crate::mode::Mode;

pub const KEYS: &[Key] = &[
    Key {
        name: "host_root",
        default: Some("/host"),
        help: "Mount point of the host's file system; conf_dir, bin_dir, record_dir and plugin_state_dir are paths below it",
    },
    Key {
        name: "conf_dir",
        default: Some(""),
        help: "Directory of the runtime's network configurations; empty: from the configuration of containerd or CRI-O, else /etc/cni/net.d",
    },
    Key {
        name: "bin_dir",
        default: Some(""),
        help: "Directory of the runtime's CNI plugins; empty: the first that can be written of those in the configuration of containerd or CRI-O, else /opt/cni/bin",
    },
    Key {
        name: "mode",
        default: Some("owned"),
        help: "How inpod joins the chain: owned (a copy of the primary's file that sorts before it, with Multus a copy of the file that Multus calls), in-place (in the primary's file) or standalone (a file with only inpod, for annotations of Multus)",
    },
    Key {
        name: "owned_file",
        default: Some("02-inpod.conflist"),
        help: "File name with mode=owned; it must sort before the primary's, and behind the file of Multus",
    },
    Key {
        name: "standalone_file",
        default: Some("inpod.conflist"),
        help: "File name with mode=standalone",
    },
    Key {
        name: "standalone_name",
        default: Some("inpod-cni"),
        help: "Network name with mode=standalone, as used in Multus annotations",
    },
    Key {
        name: "primary_file",
        default: Some(""),
        help: "The primary's file; empty: the first one, determined anew at each change",
    },
    Key {
        name: "plugin_source",
        default: Some("/inpod-cni"),
        help: "Plugin binary to install",
    },
    Key {
        name: "agent_socket",
        default: Some("/run/inpod/pod-events/grpc.sock"),
        help: "The plugin's agentSocket: socket of pod-events on the host",
    },
    Key {
        name: "plugin_state_dir",
        default: Some("/var/lib/inpod/plugin"),
        help: "The plugin's stateDir: files it shares with pod-events on the host",
    },
    Key {
        name: "plugin_timeout_seconds",
        default: Some("30"),
        help: "The plugin's timeoutSeconds: time limit of a call, 1 to 600",
    },
    Key {
        name: "exclude_namespaces",
        default: Some(""),
        help: "The plugin's excludeNamespaces: pods of these are never enrolled; set it as for pod-events",
    },
    Key {
        name: "agent_unavailable",
        default: Some("fail"),
        help: "The plugin's agentUnavailable: whether pods of enrolled namespaces fail to start or start unenrolled while the agent is unreachable, fail or allow",
    },
    Key {
        name: "plugin_log_level",
        default: Some("info"),
        help: "The plugin's logLevel: error, warn, info, debug or trace",
    },
    Key {
        name: "plugin_default_namespace",
        default: Some(""),
        help: "The plugin's defaultNamespace: namespace of pods for which the runtime names none, as podman does",
    },
    Key {
        name: "sweep_seconds",
        default: Some("30"),
        help: "Interval of reconciles without a change",
    },
    Key {
        name: "record_dir",
        default: Some("/var/lib/inpod/installer"),
        help: "Directory of the record of changes on the host, which uninstall and handover need",
    },
    Key {
        name: "leave_file",
        default: Some("/etc/inpod/leave/mode"),
        help: "Contains uninstall or handover when inpod is to leave the node; an empty file means stay, and so does a missing one unless inpod has left",
    },
    Key {
        name: "receipt_file",
        default: Some("/dev/termination-log"),
        help: "File that receives one line when this service has left the node",
    },
    Key {
        name: "binary_grace_seconds",
        default: Some("10"),
        help: "How long the plugin stays installed after inpod has left the chain, for calls in progress",
    },
    Key {
        name: "keep_binary",
        default: Some("false"),
        help: "Whether uninstall and handover keep the plugin (true or false): CRI-O repeats DELs with the chain of the ADD",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// The mount point of the host's file system in this container.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub host_root: PathBuf,
    #[serde(deserialize_with = "optional_path")]
    pub(crate) conf_dir: Option<PathBuf>,
    #[serde(deserialize_with = "optional_path")]
    pub(crate) bin_dir: Option<PathBuf>,
    pub mode: Mode,
    #[serde(deserialize_with = "list_name")]
    pub owned_file: String,
    #[serde(deserialize_with = "file_name")]
    pub standalone_file: String,
    pub standalone_name: String,
    #[serde(deserialize_with = "optional_name")]
    pub(crate) primary_file: Option<String>,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub plugin_source: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub(crate) agent_socket: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub(crate) plugin_state_dir: PathBuf,
    #[serde(deserialize_with = "timeout")]
    pub(crate) plugin_timeout_seconds: u16,
    #[serde(deserialize_with = "inpod_service::list")]
    pub(crate) exclude_namespaces: Vec<NamespaceName>,
    pub(crate) agent_unavailable: inpod_cni::config::AgentUnavailable,
    pub(crate) plugin_log_level: inpod_cni::config::Level,
    #[serde(deserialize_with = "optional_namespace")]
    pub(crate) plugin_default_namespace: Option<NamespaceName>,
    sweep_seconds: NonZeroU16,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    record_dir: PathBuf,
    /// The file that holds the request to uninstall or hand over.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub leave_file: PathBuf,
    /// The file that receives the receipt when the request is done.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub receipt_file: PathBuf,
    binary_grace_seconds: u16,
    pub keep_binary: bool,
}

impl Config {
    /// Maps a path on the host to the path in this mount namespace.
    pub fn on_host(&self, path: &Path) -> PathBuf {
        below(&self.host_root, path)
    }

    /// Returns the path of the record's directory in this mount namespace.
    pub fn record_dir(&self) -> PathBuf {
        self.on_host(&self.record_dir)
    }

    /// Returns the interval of the reconciles that no event triggers.
    pub fn sweep(&self) -> Duration {
        Duration::from_secs(self.sweep_seconds.get().into())
    }

    /// Returns how long the plugin's binary stays after its entry has left the chain.
    pub fn binary_grace(&self) -> Duration {
        Duration::from_secs(self.binary_grace_seconds.into())
    }
}

/// Parses a setting whose empty text means that it is not set.
fn optional<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(StringDeserializer<D::Error>) -> Result<T, D::Error>,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() {
        return Ok(None);
    }
    parse(text.into_deserializer()).map(Some)
}

fn optional_path<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    optional(from, inpod_service::config::absolute)
}

fn optional_namespace<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<NamespaceName>, D::Error> {
    optional(from, NamespaceName::deserialize)
}

fn optional_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    optional(from, file_name)
}

/// Accepts the name of a file that runtimes would load.
fn file_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    if name.contains('/') || name.starts_with('.') || !is_loaded(&name) {
        return Err(D::Error::custom(format!(
            "\"{name}\" is not a file name that runtimes load: it must end in .conflist, .conf or .json, without a slash"
        )));
    }
    Ok(name)
}

fn list_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = file_name(deserializer)?;
    if !name.ends_with(".conflist") {
        let message = format!("\"{name}\" does not end in .conflist");
        return Err(D::Error::custom(message));
    }
    Ok(name)
}

fn timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let seconds = u16::deserialize(deserializer)?;
    if !(1..=600).contains(&seconds) {
        return Err(D::Error::custom(format!("{seconds} is not in 1 to 600")));
    }
    Ok(seconds)
}
