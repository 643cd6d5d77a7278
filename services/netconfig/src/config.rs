use std::{path::PathBuf, time::Duration};

use daemon::Key;
use serde::{Deserialize, Deserializer, de::Error as _};

/// The settings of this service alone.
pub(crate) const KEYS: &[Key] = &[
    Key {
        name: "netns_roots",
        // /var/run may be a directory of its own; dockershim passes the third, cri-dockerd the last.
        default: Some("/run/netns,/var/run/netns,/var/run/docker/netns,/proc"),
        help: "Directories below which a netns may be, with commas between them",
    },
    Key {
        name: "sweep_seconds",
        default: Some("5"),
        help: "How often claims are looked through for those whose netns is gone",
    },
];

/// The settings, parsed.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Directories below which a netns may be.
    #[serde(deserialize_with = "daemon::list")]
    pub netns_roots: Vec<PathBuf>,
    /// How often claims are looked through.
    #[serde(rename = "sweep_seconds", deserialize_with = "seconds")]
    pub sweep: Duration,
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    match u64::deserialize(deserializer)? {
        seconds @ 1..=3600 => Ok(Duration::from_secs(seconds)),
        other => Err(D::Error::custom(format!("{other} is not from 1 to 3600"))),
    }
}
