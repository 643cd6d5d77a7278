//! Loads the defaults, then the file, the environment and the flags. A setting has the same flat key in every source,
//! and each source is checked against the service's list of settings.

mod source;

use std::{
    ffi::OsString,
    fmt::{self, Write as _},
    marker::PhantomData,
    net::SocketAddr,
    num::NonZeroUsize,
    path::PathBuf,
    str::FromStr,
};

use clap::{Arg, ArgAction};
use config::{Config, Map, Value, ValueKind};
use inpod_types::cgroup::HostCgroup;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};

use crate::{Service, check::Question, log, peer};

/// A setting. For example, `zds_socket` is `zds_socket` in the file, `INPOD_ZDS_SOCKET` in the environment and
/// `--zds-socket` as a flag.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    pub name: &'static str,
    /// The default as text, or `None` if the setting is required.
    pub default: Option<&'static str>,
    /// A description of one line, for `--help` and the reference pages.
    pub help: &'static str,
}

/// The settings that every service has.
pub const COMMON: &[Key] = &[
    Key {
        name: "run_dir",
        default: Some("/run/inpod"),
        help: "Directory of all state, and of all sockets but the ZDS socket",
    },
    Key {
        name: "peer",
        default: Some("pod"),
        help: "What identifies the other services of inpod: pod, cgroup:PATH, or uid (for demos and development)",
    },
    Key {
        name: "host_cgroups",
        default: Some(""),
        help: "Further cgroups of the node's own processes, separated by commas, for container runtimes and shells outside of system.slice and user.slice; a cgroup below that names a pod or a container is not the node's",
    },
    Key {
        name: "log_level",
        default: Some("info"),
        help: "Log level: error, warn, info, debug or trace",
    },
    Key {
        name: "log_format",
        default: Some("json"),
        help: "Log format: json or text",
    },
    Key {
        name: "max_calls",
        // The default admits a burst of 500 ADDs (more than a full node) with as many DELs.
        default: Some("1024"),
        help: "Maximum number of concurrent calls; further calls fail with OVERLOADED. Calls of services and of other processes have separate limits of this size, in pod-events also ADD, and DEL with GC",
    },
    Key {
        name: "health_address",
        default: Some(""),
        help: "ADDRESS:PORT at which HTTP probes are answered: /livez and /readyz, like --check-live and --check; empty: nowhere",
    },
];

/// Settings of the previous release that no service has any more, each with its replacement.
const REMOVED: &[(&str, &str)] = &[(
    "otlp_endpoint",
    "services export no spans any more; remove the setting, and use the trace_id of the logs and the metric inpod_pod_events_add_phase_duration_seconds",
)];

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Common {
    #[serde(deserialize_with = "absolute")]
    pub(crate) run_dir: PathBuf,
    #[serde(deserialize_with = "parsed")]
    pub(crate) peer: peer::Setting,
    #[serde(deserialize_with = "list")]
    pub(crate) host_cgroups: Vec<HostCgroup>,
    #[serde(deserialize_with = "parsed")]
    pub(crate) log_level: tracing::Level,
    #[serde(deserialize_with = "parsed")]
    pub(crate) log_format: log::Format,
    pub(crate) max_calls: NonZeroUsize,
    #[serde(deserialize_with = "optional_address")]
    pub(crate) health_address: Option<SocketAddr>,
}

#[derive(Debug)]
pub(crate) enum Command {
    PrintHelp(String),
    /// Prints the effective settings and their sources.
    PrintConfig(String),
    /// Asks the running service for its health.
    Check(Common, Question),
    Run(Loaded),
}

#[derive(Debug)]
pub(crate) struct Loaded {
    config: Config,
    origins: Map<String, String>,
}

impl Loaded {
    pub(crate) fn parse<C: DeserializeOwned>(self) -> Result<(Common, C), ConfigError> {
        Ok((self.read()?, self.read()?))
    }

    /// Deserializes the settings into the service's type, and ignores settings without a field there.
    pub(crate) fn read<C: DeserializeOwned>(&self) -> Result<C, ConfigError> {
        let unusable = |cause| ConfigError::value(cause, &self.origins);
        self.config.clone().try_deserialize().map_err(unusable)
    }
}

/// Reasons why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line is wrong, as the text from clap explains.
    #[error("{0}")]
    Arguments(String),
    /// A setting is unknown, or required and missing, as the text explains.
    #[error("{0}")]
    Keys(String),
    /// The file is unreadable, or the settings have wrong types or values.
    #[error("{problem}")]
    Unusable {
        problem: String,
        source: Box<config::ConfigError>,
    },
}

impl ConfigError {
    fn unusable(problem: String, source: config::ConfigError) -> Self {
        let source = Box::new(source);
        Self::Unusable { problem, source }
    }

    fn build(source: config::ConfigError) -> Self {
        Self::unusable("the settings cannot be used".to_owned(), source)
    }

    /// Reports a list entry such as `key[2]` under the name of its setting.
    fn value(source: config::ConfigError, origins: &Map<String, String>) -> Self {
        let (config::ConfigError::Type { key: Some(key), .. }
        | config::ConfigError::At { key: Some(key), .. }) = &source
        else {
            return Self::build(source);
        };
        let key = key.split(['.', '[']).next().unwrap_or_default();
        let origin = match origins.get(key).map(String::as_str) {
            Some(origin @ ("environment" | "command line")) => format!("the {origin}"),
            origin => origin.unwrap_or("nowhere").to_owned(),
        };
        let problem = format!("setting {key} from {origin} cannot be used");
        Self::unusable(problem, source)
    }
}

/// Loads the settings from all sources, and determines the command.
///
/// # Errors
///
/// Fails if a setting is unknown, unusable, or required and missing.
pub(crate) fn load(
    service: &Service,
    arguments: &[OsString],
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Command, ConfigError> {
    let keys: Vec<Key> = COMMON.iter().chain(service.keys).copied().collect();
    let matches = match command(service, &keys).try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) if !error.use_stderr() => {
            return Ok(Command::PrintHelp(error.to_string()));
        }
        Err(error) => return Err(ConfigError::Arguments(error.to_string().trim().to_owned())),
    };
    let file = matches.get_one("config").cloned();
    let file = file.unwrap_or_else(|| format!("/etc/inpod/{}.toml", service.name));
    let mut builder = Config::builder();
    let mut origins = Map::new();
    for (origin, values) in [
        ("default".to_owned(), source::defaults(&keys)),
        (
            file.clone(),
            source::from_file(&keys, &file, matches.contains_id("config"))?,
        ),
        (
            "environment".to_owned(),
            source::from_environment(&keys, environment)?,
        ),
        (
            "command line".to_owned(),
            source::from_flags(&keys, &matches)?,
        ),
    ] {
        for (name, value) in values {
            builder = builder
                .set_override(&name, value)
                .map_err(ConfigError::build)?;
            origins.insert(name, origin.clone());
        }
    }
    let missing = keys.iter().find(|key| !origins.contains_key(key.name));
    if let Some(Key { name, .. }) = missing {
        let (flag, env) = (name.replace('_', "-"), name.to_uppercase());
        return Err(ConfigError::Keys(format!(
            "setting {name} is required: set --{flag}, INPOD_{env}, or {name} in {file}"
        )));
    }
    let config = builder.build().map_err(ConfigError::build)?;
    if matches.get_flag("print-config") {
        return Ok(Command::PrintConfig(print(&keys, &config, &origins)));
    }
    let loaded = Loaded { config, origins };
    for (flag, question) in [("check", Question::Ready), ("check-live", Question::Live)] {
        if matches.get_flag(flag) {
            return Ok(Command::Check(loaded.read()?, question));
        }
    }
    Ok(Command::Run(loaded))
}

fn command(service: &Service, keys: &[Key]) -> clap::Command {
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .help(help)
            .action(ArgAction::SetTrue)
    };
    let config = Arg::new("config").long("config").value_name("FILE");
    clap::Command::new(service.name)
        .version(service.version)
        .about(service.about)
        .next_line_help(true)
        .term_width(80)
        .after_help("Each setting is also an environment variable (--log-level is INPOD_LOG_LEVEL) and a key of the file (log_level).")
        .arg(config.help(format!("Settings file in TOML [default: /etc/inpod/{}.toml, if it exists]", service.name)))
        .arg(flag("print-config", "Print the effective settings and the source of each, then exit"))
        .arg(flag("check", "Exit 0 if the running service is ready, else 1"))
        .arg(flag("check-live", "Exit 0 if the running service answers, else 1"))
        .args(keys.iter().map(|key| {
            let default = match key.default {
                None => "required".to_owned(),
                Some("") => "default: none".to_owned(),
                // clap does not break text without spaces, so long defaults are left out.
                Some(text) if text.len() > 60 => "default: see --print-config".to_owned(),
                Some(text) => format!("default: {text}"),
            };
            Arg::new(key.name)
                .long(key.name.replace('_', "-"))
                .value_name("VALUE")
                .help(format!("{} [{default}]", key.help))
        }))
        .args(REMOVED.iter().map(|(name, _)| {
            Arg::new(*name).long(name.replace('_', "-")).hide(true)
        }))
}

/// Renders the settings as a file, with the source of each value as a comment.
fn print(keys: &[Key], config: &Config, origins: &Map<String, String>) -> String {
    let mut text = String::new();
    for key in keys {
        let value = config
            .get::<Value>(key.name)
            .map_or_else(|_| String::new(), |value| toml(&value));
        let origin = origins.get(key.name).map_or("", String::as_str);
        writeln!(text, "{} = {value} # {origin}", key.name).unwrap_or_default();
    }
    text
}

fn toml(value: &Value) -> String {
    match &value.kind {
        ValueKind::Array(items) => format!(
            "[{}]",
            items.iter().map(toml).collect::<Vec<_>>().join(", ")
        ),
        ValueKind::String(text) => format!("{text:?}"),
        ValueKind::Nil
        | ValueKind::Boolean(_)
        | ValueKind::I64(_)
        | ValueKind::I128(_)
        | ValueKind::U64(_)
        | ValueKind::U128(_)
        | ValueKind::Float(_)
        | ValueKind::Table(_) => value.kind.to_string(),
    }
}

/// Parses a setting with `FromStr`, for `#[serde(deserialize_with = ...)]`.
pub fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|error: T::Err| {
        let message = error.to_string();
        if message.contains(&format!("\"{text}\"")) {
            D::Error::custom(message)
        } else {
            D::Error::custom(format!("\"{text}\": {message}"))
        }
    })
}

/// Deserializes an absolute path, for `#[serde(deserialize_with = ...)]`. A relative path would depend on the directory
/// in which the process is started.
///
/// # Errors
///
/// Fails if the path is empty or relative.
pub fn absolute<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    if path.is_absolute() {
        return Ok(path);
    }
    let message = format!("\"{}\" is not an absolute path", path.display());
    Err(D::Error::custom(message))
}

/// Deserializes an address with a port, for `#[serde(deserialize_with = ...)]`; an empty text means no address.
///
/// # Errors
///
/// Fails if the text is neither empty nor an address with a port.
pub fn optional_address<'de, D>(deserializer: D) -> Result<Option<SocketAddr>, D::Error>
where
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    if text.is_empty() {
        return Ok(None);
    }
    let wrong = |_| D::Error::custom(format!("\"{text}\" is not ADDRESS:PORT, or empty"));
    text.parse().map(Some).map_err(wrong)
}

/// Deserializes a list, for `#[serde(deserialize_with = ...)]`: an array in the file, and a comma-separated text
/// elsewhere.
///
/// # Errors
///
/// Fails if an item of the list cannot be parsed.
pub fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    deserializer.deserialize_any(List(PhantomData))
}

struct List<T>(PhantomData<T>);

impl<'de, T: FromStr<Err: fmt::Display>> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list, or a comma-separated text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<T>, E> {
        let items = text
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty());
        items.map(|item| item.parse().map_err(E::custom)).collect()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element::<String>()? {
            list.push(item.parse().map_err(A::Error::custom)?);
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests;
