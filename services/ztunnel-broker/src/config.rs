//! The settings of the broker.

use std::{num::NonZeroU16, path::PathBuf, time::Duration};

use inpod_service::{Key, peer::Setting};
use serde::Deserialize;

use crate::peer::Policy;

pub const KEYS: &[Key] = &[
    Key {
        name: "zds_socket",
        default: Some("/var/run/ztunnel/ztunnel.sock"),
        help: "Socket on which ztunnels connect",
    },
    Key {
        name: "ztunnel_peer",
        default: Some("pod"),
        help: "How a ztunnel is authenticated: pod (its pod is one that pod-events reports as a ztunnel), cgroup:PATH, or uid (demo and development)",
    },
    Key {
        name: "ack_timeout_seconds",
        default: Some("10"),
        help: "How long a ztunnel may take to acknowledge a message before its session is closed",
    },
    Key {
        name: "undo_reserve_seconds",
        default: Some("3"),
        help: "How much of its caller's deadline an AddWorkload that finds no ztunnel leaves for the caller to undo its steps",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub zds_socket: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    ztunnel_peer: Setting,
    /// The timeout of acknowledgements, independent of callers' deadlines. With 0 no session would last.
    ack_timeout_seconds: NonZeroU16,
    undo_reserve_seconds: u16,
}

impl Config {
    pub fn policy(&self) -> Policy {
        Policy::new(self.ztunnel_peer.clone())
    }

    pub fn ack_timeout(&self) -> Duration {
        Duration::from_secs(self.ack_timeout_seconds.get().into())
    }

    pub fn undo_reserve(&self) -> Duration {
        Duration::from_secs(self.undo_reserve_seconds.into())
    }
}
