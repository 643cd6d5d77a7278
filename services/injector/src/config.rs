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
    deadline_seconds: NonZeroU16,
    pub(crate) max_reviews: NonZeroUsize,
    #[serde(deserialize_with = "inpod_service::config::optional_address")]
    pub(crate) metrics_address: Option<SocketAddr>,
}

impl Config {
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline_seconds.get().into())
    }
}
