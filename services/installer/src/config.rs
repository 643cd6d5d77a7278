//! The settings of this service.

use std::{
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::Duration,
};

use inpod_cni_config::is_loaded;
use inpod_service::Key;
use inpod_types::NamespaceName;
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::mode::Mode;

/// See [`Config`].
pub const KEYS: &[Key] = &[
    Key {
        name: "host_root",
        default: Some("/host"),
        help: "Where the host's file system is seen; conf_dir, bin_dir, record_dir and plugin_state_dir are paths below it",
    },
    Key {
        name: "conf_dir",
        default: Some(""),
        help: "Directory of the runtime's network configurations; none: as the configuration of containerd or CRI-O says, else /etc/cni/net.d",
    },
    Key {
        name: "bin_dir",
        default: Some(""),
        help: "Directory of the runtime's CNI plugins; none: as the configuration of containerd or CRI-O says, else /opt/cni/bin",
    },
    Key {
        name: "mode",
        default: Some("owned"),
        help: "How inpod gets into the chain: owned (a file of its own ahead of the primary, with a copy of it), in-place (in the primary's file) or standalone (a file with nothing else, for Multus)",
    },
    Key {
        name: "owned_file",
        default: Some("02-inpod.conflist"),
        help: "With mode=owned, the file's name; it must sort before the primary's",
    },
    Key {
        name: "standalone_file",
        default: Some("inpod.conflist"),
        help: "With mode=standalone, the file's name",
    },
    Key {
        name: "standalone_name",
        default: Some("inpod-cni"),
        help: "With mode=standalone, the network's name, by which Multus is asked for it",
    },
    Key {
        name: "primary_file",
        default: Some(""),
        help: "The primary's file; none: the first valid one, looked for anew at each change",
    },
    Key {
        name: "plugin_source",
        default: Some("/inpod-cni"),
        help: "The plugin that is installed",
    },
    Key {
        name: "agent_socket",
        default: Some("/run/inpod/pod-events/grpc.sock"),
        help: "The plugin's agentSocket: where pod-events listens on the host",
    },
    Key {
        name: "plugin_state_dir",
        default: Some("/var/lib/inpod/plugin"),
        help: "The plugin's stateDir: what it shares with pod-events on the host",
    },
    Key {
        name: "plugin_timeout_seconds",
        default: Some("30"),
        help: "The plugin's timeoutSeconds: how long a call may take, 1 to 600",
    },
    Key {
        name: "exclude_namespaces",
        default: Some(""),
        help: "The plugin's excludeNamespaces: pods of these pass at once; the same as pod-events'",
    },
    Key {
        name: "agent_unavailable",
        default: Some("fail"),
        help: "The plugin's agentUnavailable: what becomes of pods of enrolled namespaces while the agent is away, fail or allow",
    },
    Key {
        name: "plugin_log_level",
        default: Some("info"),
        help: "The plugin's logLevel: error, warn, info, debug or trace",
    },
    Key {
        name: "plugin_default_namespace",
        default: Some(""),
        help: "The plugin's defaultNamespace: where pods are that a runtime names without a namespace, as podman does",
    },
    Key {
        name: "sweep_seconds",
        default: Some("30"),
        help: "How often everything is looked at although nothing was heard of it",
    },
    Key {
        name: "record_dir",
        default: Some("/var/lib/inpod/installer"),
        help: "Where it is written down what was changed on the host, for leaving",
    },
    Key {
        name: "leave_file",
        default: Some("/etc/inpod/leave/mode"),
        help: "Holds uninstall or handover when inpod is to leave the node; an empty one means stay, and so does a missing one unless it has left",
    },
    Key {
        name: "receipt_file",
        default: Some("/dev/termination-log"),
        help: "Where one line is written when this service has left",
    },
    Key {
        name: "binary_grace_seconds",
        default: Some("10"),
        help: "How long the plugin stays after the chain has left, for calls under way",
    },
    Key {
        name: "keep_binary",
        default: Some("false"),
        help: "Whether leaving keeps the plugin (true or false): CRI-O repeats DELs with the chain of the ADD",
    },
];

/// What this service is told.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Where the host's file system is seen.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub host_root: PathBuf,
    #[serde(deserialize_with = "optional_path")]
    pub(crate) conf_dir: Option<PathBuf>,
    #[serde(deserialize_with = "optional_path")]
    pub(crate) bin_dir: Option<PathBuf>,
    /// How inpod gets into the chain.
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub mode: Mode,
    /// The own file of mode owned.
    #[serde(deserialize_with = "list_name")]
    pub owned_file: String,
    /// The own file of mode standalone.
    #[serde(deserialize_with = "file_name")]
    pub standalone_file: String,
    /// The network's name in mode standalone.
    pub standalone_name: String,
    #[serde(deserialize_with = "optional_name")]
    pub(crate) primary_file: Option<String>,
    /// The plugin that is installed.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub plugin_source: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub(crate) agent_socket: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    plugin_state_dir: PathBuf,
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
    /// Says whether inpod is to leave.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub leave_file: PathBuf,
    /// Where leaving is told.
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub receipt_file: PathBuf,
    binary_grace_seconds: u16,
    /// Whether leaving keeps the plugin.
    pub keep_binary: bool,
}

impl Config {
    /// A path of the host as it is seen here.
    pub fn on_host(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix("/").unwrap_or(path);
        self.host_root.join(below)
    }

    /// The plugin's `stateDir` as the plugin sees it.
    pub fn plugin_state_dir(&self) -> &Path {
        &self.plugin_state_dir
    }

    /// Where the record is, as it is seen here.
    pub fn record_dir(&self) -> PathBuf {
        self.on_host(&self.record_dir)
    }

    /// How often everything is looked at.
    pub fn sweep(&self) -> Duration {
        Duration::from_secs(self.sweep_seconds.get().into())
    }

    /// How long the plugin outlives the chain.
    pub fn binary_grace(&self) -> Duration {
        Duration::from_secs(self.binary_grace_seconds.into())
    }
}

fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn optional_path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let path = optional(deserializer)?.map(PathBuf::from);
    match path {
        Some(path) if !path.is_absolute() => {
            let message = format!("\"{}\" is no absolute path", path.display());
            Err(D::Error::custom(message))
        }
        other => Ok(other),
    }
}

fn optional_namespace<'de, D>(deserializer: D) -> Result<Option<NamespaceName>, D::Error>
where
    D: Deserializer<'de>,
{
    let parse = |text: String| text.parse().map_err(D::Error::custom);
    optional(deserializer)?.map(parse).transpose()
}

/// A name in the directory that runtimes load.
fn named(name: &str) -> Result<(), String> {
    if name.contains('/') || name.starts_with('.') || !is_loaded(name) {
        return Err(format!(
            "\"{name}\" is no file name that a runtime loads: it must end in .conflist, .conf or .json, without a slash"
        ));
    }
    Ok(())
}

fn file_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    named(&name).map_err(D::Error::custom)?;
    Ok(name)
}

fn list_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = file_name(deserializer)?;
    if !name.ends_with(".conflist") {
        return Err(D::Error::custom(format!(
            "\"{name}\" does not end in .conflist"
        )));
    }
    Ok(name)
}

fn optional_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let name = optional(deserializer)?;
    name.as_deref()
        .map(named)
        .transpose()
        .map_err(D::Error::custom)?;
    Ok(name)
}

fn timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let seconds = u16::deserialize(deserializer)?;
    if !(1..=600).contains(&seconds) {
        return Err(D::Error::custom(format!("{seconds} is not in 1 to 600")));
    }
    Ok(seconds)
}
