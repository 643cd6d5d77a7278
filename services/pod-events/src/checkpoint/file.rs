//! The format of a checkpoint file: schema 1, or 2 if the redirection is to a sidecar. A release that only knows schema
//! 1 sets a file of schema 2 aside; with schema 1, the release would withdraw the pod.

use std::{io, path::PathBuf};

use inpod_types::NetnsRef;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Record;
use crate::redirection::{Redirection, RequestedSettings, Sidecar};

const SCHEMA: u32 = 2;

const AMBIENT: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub(super) enum ParseError {
    #[error(transparent)]
    Unusable(io::Error),
    #[error("not a checkpoint file: {0}")]
    Json(#[from] serde_json::Error),
    #[error("schema {0} is not supported; this release reads up to {SCHEMA}")]
    Schema(u32),
}

#[derive(Serialize, Deserialize)]
struct File<R> {
    schema: u32,
    boot_id: String,
    #[serde(flatten)]
    record: R,
}

/// The names of the netns's fields in the file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "NetnsRef")]
pub(super) struct Netns {
    #[serde(rename = "netns_path")]
    path: PathBuf,
    #[serde(rename = "netns_device")]
    device: Option<u64>,
    #[serde(rename = "netns_inode")]
    inode: Option<u64>,
    #[serde(rename = "netns_cookie")]
    cookie: Option<u64>,
}

/// A redirection in the form of the file, in which a sidecar's redirection follows default settings.
#[derive(Serialize, Deserialize)]
pub(super) struct Settings {
    #[serde(default)]
    wishes: RequestedSettings,
    #[serde(skip_serializing_if = "Option::is_none")]
    sidecar: Option<Box<Sidecar>>,
}

impl Settings {
    pub(super) fn serialize<S: Serializer>(from: &Redirection, to: S) -> Result<S::Ok, S::Error> {
        let (wishes, sidecar) = match from.clone() {
            Redirection::Ambient(settings) => (settings, None),
            Redirection::Sidecar(sidecar) => (RequestedSettings::default(), Some(sidecar)),
        };
        Serialize::serialize(&Self { wishes, sidecar }, to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Redirection, D::Error> {
        let Self { wishes, sidecar } = Deserialize::deserialize(from)?;
        Ok(sidecar.map_or(Redirection::Ambient(wishes), Redirection::Sidecar))
    }
}

/// Parses a file. Returns `None` if the file is from another boot.
pub(super) fn parse(bytes: &[u8], boot_id: &str) -> Result<Option<Record>, ParseError> {
    let header: File<()> = serde_json::from_slice(bytes)?;
    if !(AMBIENT..=SCHEMA).contains(&header.schema) {
        return Err(ParseError::Schema(header.schema));
    }
    let is_current = header.boot_id == boot_id;
    Ok(is_current
        .then(|| serde_json::from_slice(bytes))
        .transpose()?)
}

pub(super) fn render(record: &Record, boot_id: &str) -> String {
    let is_sidecar = record.redirection.is_sidecar();
    let file = File {
        schema: if is_sidecar { SCHEMA } else { AMBIENT },
        boot_id: boot_id.to_owned(),
        record,
    };
    // Serialization fails only for maps whose keys are not strings, and the file has no such map.
    serde_json::to_string(&file).unwrap_or_default()
}
