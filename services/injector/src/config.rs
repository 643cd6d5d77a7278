//! The settings of this service. What is injected stands in a file of its own (`inpod_injection::Config`).

use std::{
    net::SocketAddr,
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use inpod_service::Key;
use serde::{Deserialize, Deserializer, de::Error as _};

/// See [`Config`].
pub const KEYS: &[Key] = &[
    Key {
        name: "listen_address",
        default: Some("0.0.0.0:15017"),
        help: "Where the webhook is served over HTTPS, ADDRESS:PORT; [::]:15017 for clusters with IPv6",
    },
    Key {
        name: "tls_dir",
        default: Some("/etc/inpod/injector/tls"),
        help: "Holds tls.crt and tls.key, followed without a restart: a Secret that is mounted",
    },
    Key {
        name: "config_file",
        default: Some("/etc/inpod/injector/config/inject.yaml"),
        help: "What is injected, followed without a restart; a missing file is the default (services/lib/inpod-injection/README.md)",
    },
    Key {
        name: "reload_seconds",
        default: Some("2"),
        help: "How often the two are looked at",
    },
    Key {
        name: "deadline_seconds",
        default: Some("8"),
        help: "How long a review may take, unless the API server gives it less",
    },
    Key {
        name: "max_reviews",
        default: Some("16"),
        help: "How many reviews are worked on at once; further ones wait until their deadline",
    },
    Key {
        name: "max_connections",
        default: Some("512"),
        help: "How many connections are held; for a further one the idlest is closed",
    },
    Key {
        name: "linger_seconds",
        default: Some("5"),
        help: "How long the webhook is still served after SIGTERM, for API servers that have not heard of it",
    },
    Key {
        name: "metrics_address",
        default: Some(""),
        help: "ADDRESS:PORT where metrics are answered in plain; none: on the socket alone",
    },
];

/// What this service is told.
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
    #[serde(deserialize_with = "optional_address")]
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

fn optional_address<'de, D>(deserializer: D) -> Result<Option<SocketAddr>, D::Error>
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
