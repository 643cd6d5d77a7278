use std::time::Duration;

use clap::{Args, ValueEnum};
use inpod_proto::log::v1::LogLevel;

use super::parse_seconds;

#[derive(Args, Debug)]
pub(crate) struct LogLevelOptions {
    /// The service. Without a service, the levels of all services of the node are printed.
    #[arg(value_enum, value_name = "SERVICE", hide_possible_values = true)]
    pub(crate) service: Option<LoggingService>,
    /// error, warn, info, debug, trace, or default to end the time at once. Without a level, the levels are printed.
    #[arg(value_enum, value_name = "LEVEL", hide_possible_values = true)]
    pub(crate) level: Option<Level>,
    /// Only a module with its submodules, such as pod_events::tasks, or a library, such as kube.
    #[arg(
        long,
        value_name = "MODULE",
        default_value = "",
        hide_default_value = true,
        requires = "level"
    )]
    pub(crate) scope: String,
    /// Seconds until the default level applies again, at most 86400.
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds, default_value = "600", requires = "level")]
    pub(crate) duration: Duration,
}

// clap would add doc comments of the variants to the completion scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoggingService {
    PodEvents,
    Netconfig,
    ZtunnelBroker,
    Installer,
    Repair,
    Injector,
}

impl LoggingService {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PodEvents => "pod-events",
            Self::Netconfig => "netconfig",
            Self::ZtunnelBroker => "ztunnel-broker",
            Self::Installer => "installer",
            Self::Repair => "repair",
            Self::Injector => "injector",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    Default,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<Level> for LogLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Default => Self::Unspecified,
            Level::Error => Self::Error,
            Level::Warn => Self::Warn,
            Level::Info => Self::Info,
            Level::Debug => Self::Debug,
            Level::Trace => Self::Trace,
        }
    }
}
