//! The settings of the service. Injection has a configuration file of its own (`inpod_injection::Config`).

use std::{
    net::SocketAddr,
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use inpod_service::Key;
use serde::Deserialize;

pub const KEYS: &[Key] = &[
    Key {
        name: "listen_address",
        default: Some("0.0.0.0:15017"),
        help: "Listen address of the webhook (HTTPS), ADDRESS:PORT; [::]:15017 for clusters with IPv6",
    },
    Key {
        name: "tls_dir",
        default: Some("/etc/inpod/injector/tls"),
        help: "Directory with tls.crt and tls.key, a mounted Secret; reloaded without a restart",
    },
    Key {
        name: "config_file",
        default: Some("/etc/inpod/injector/config/inject.yaml"),
        help: "Configuration of the injection, reloaded without a restart; without the file the defaults apply (services/lib/inpod-injection/README.md)",
    },
    Key {
        name: "reload_seconds",
        default: Some("2"),
        help: "Poll interval of certificate and configuration",
    },
    Key {
        name: "deadline_seconds",
        default: Some("8"),
        help: "Time limit of a review, unless the API server's is shorter",
    },
    Key {
        name: "max_reviews",
        default: Some("4"),
        help: "Maximum number of concurrent reviews; further ones wait until their deadline",
    },
    Key {
        name: "max_connections",
        default: Some("512"),
        help: "Maximum number of connections; a further one closes the one that has been idle for longest",
    },
    Key {
        name: "linger_seconds",
        default: Some("5"),
        help: "How long the webhook serves after SIGTERM, until API servers stop calling it",
    },
    Key {
        name: "metrics_address",
        default: Some(""),
        help: "Listen address of metrics (HTTP), ADDRESS:PORT; empty: on the socket only",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    pub(crate) listen_address: SocketAddr,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub(crate) tls_dir: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub(crate) config_file: PathBuf,
    reload_seconds: NonZeroU16,
    deadline_seconds: NonZeroU16,
    pub(crate) max_reviews: NonZeroUsize,
    pub(crate) max_connections: NonZeroUsize,
    linger_seconds: u16,
    #[serde(deserialize_with = "inpod_service::config::optional_address")]
    pub(crate) metrics_address: Option<SocketAddr>,
}

impl Config {
    pub(crate) fn reload(&self) -> Duration {
        Duration::from_secs(self.reload_seconds.get().into())
    }

    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline_seconds.get().into())
    }

    pub(crate) fn linger(&self) -> Duration {
        Duration::from_secs(self.linger_seconds.into())
    }
}
