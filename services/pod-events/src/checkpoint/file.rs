//! The format of a checkpoint file: schema 1, or 2 if the redirection is to a sidecar. A release that only knows schema
//! 1 sets a file of schema 2 aside; with schema 1, the release would withdraw the pod.

use std::{io, net::IpAddr, path::PathBuf, time::Duration};

use inpod_types::{InvalidIdentifier, NetnsId, NetnsRef, PodRef, Revision, SandboxRef};
use serde::{Deserialize, Serialize};

use super::{Intent, Record};
use crate::{
    boottime::BootInstant,
    redirection::{Redirection, RequestedSettings, Sidecar},
};

const SCHEMA: u32 = 2;

const AMBIENT: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub(super) enum ParseError {
    #[error(transparent)]
    Unusable(io::Error),
    #[error("not a checkpoint file")]
    Json(#[from] serde_json::Error),
    #[error("schema {0} is not supported; this release reads up to {SCHEMA}")]
    Schema(u32),
    #[error(transparent)]
    Identifier(#[from] InvalidIdentifier),
}

#[derive(Serialize, Deserialize)]
struct Schema {
    schema: u32,
}

#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    boot_id: String,
    network_name: String,
    container_id: String,
    ifname: String,
    namespace: String,
    name: String,
    uid: String,
    service_account: String,
    netns_path: PathBuf,
    netns_device: Option<u64>,
    netns_inode: Option<u64>,
    netns_cookie: Option<u64>,
    proven: Option<Proven>,
    addresses: Vec<IpAddr>,
    revision: u64,
    intent: FileIntent,
    #[serde(default)]
    runtime_uid: Option<String>,
    #[serde(default)]
    let_through: bool,
    #[serde(default)]
    #[serde(rename = "wishes")]
    settings: RequestedSettings,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sidecar: Option<Box<Sidecar>>,
}

#[derive(Serialize, Deserialize)]
struct Proven {
    device: u64,
    inode: u64,
    cookie: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FileIntent {
    Out,
    Enrolling,
    Inherited,
    Legacy,
    Enrolled { fingerprint: String },
    Announcing,
    Leaving { since_ms: u64 },
    Draining { since_ms: u64 },
    Deleting { since_ms: u64 },
}

/// Parses a file. Returns `None` if the file is from another boot.
pub(super) fn parse(bytes: &[u8], boot_id: &str) -> Result<Option<Record>, ParseError> {
    let Schema { schema } = serde_json::from_slice(bytes)?;
    if !(AMBIENT..=SCHEMA).contains(&schema) {
        return Err(ParseError::Schema(schema));
    }
    let file: File = serde_json::from_slice(bytes)?;
    if file.boot_id != boot_id {
        return Ok(None);
    }
    Ok(Some(Record {
        sandbox: SandboxRef {
            network_name: file.network_name.parse()?,
            container_id: file.container_id.parse()?,
            ifname: file.ifname.parse()?,
        },
        pod: PodRef {
            namespace: file.namespace.parse()?,
            name: file.name.parse()?,
            uid: file.uid.parse()?,
        },
        service_account: file.service_account.parse()?,
        netns: NetnsRef {
            path: file.netns_path,
            device: file.netns_device,
            inode: file.netns_inode,
            cookie: file.netns_cookie,
        },
        netns_id: file.proven.map(
            |Proven {
                 device,
                 inode,
                 cookie,
             }| NetnsId {
                device,
                inode,
                cookie,
            },
        ),
        addresses: file.addresses,
        revision: Revision(file.revision),
        intent: file.intent.into(),
        runtime_uid: file.runtime_uid.map(|uid| uid.parse()).transpose()?,
        admitted_unenrolled: file.let_through,
        redirection: match file.sidecar {
            Some(sidecar) => Redirection::Sidecar(sidecar),
            None => Redirection::Ambient(file.settings),
        },
    }))
}

pub(super) fn render(record: &Record, boot_id: &str) -> String {
    let (schema, settings, sidecar) = match &record.redirection {
        Redirection::Ambient(settings) => (AMBIENT, settings.clone(), None),
        Redirection::Sidecar(sidecar) => {
            (SCHEMA, RequestedSettings::default(), Some(sidecar.clone()))
        }
    };
    let file = File {
        schema,
        boot_id: boot_id.to_owned(),
        network_name: record.sandbox.network_name.to_string(),
        container_id: record.sandbox.container_id.to_string(),
        ifname: record.sandbox.ifname.to_string(),
        namespace: record.pod.namespace.to_string(),
        name: record.pod.name.to_string(),
        uid: record.pod.uid.to_string(),
        service_account: record.service_account.to_string(),
        netns_path: record.netns.path.clone(),
        netns_device: record.netns.device,
        netns_inode: record.netns.inode,
        netns_cookie: record.netns.cookie,
        proven: record.netns_id.map(
            |NetnsId {
                 device,
                 inode,
                 cookie,
             }| Proven {
                device,
                inode,
                cookie,
            },
        ),
        addresses: record.addresses.clone(),
        revision: record.revision.0,
        intent: (&record.intent).into(),
        runtime_uid: record.runtime_uid.as_ref().map(ToString::to_string),
        let_through: record.admitted_unenrolled,
        settings,
        sidecar,
    };
    // Serialization fails only for maps whose keys are not strings, and the file has no such map.
    serde_json::to_string(&file).unwrap_or_default()
}

impl From<FileIntent> for Intent {
    fn from(intent: FileIntent) -> Self {
        let at = |ms| BootInstant::after_boot(Duration::from_millis(ms));
        match intent {
            FileIntent::Out => Self::Out,
            FileIntent::Enrolling => Self::Enrolling,
            FileIntent::Inherited => Self::Adopted,
            FileIntent::Legacy => Self::Legacy { is_served: false },
            FileIntent::Enrolled { fingerprint } => Self::Enrolled { fingerprint },
            FileIntent::Announcing => Self::Announcing,
            FileIntent::Leaving { since_ms } => Self::Leaving {
                since: at(since_ms),
            },
            FileIntent::Draining { since_ms } => Self::Draining {
                since: at(since_ms),
            },
            FileIntent::Deleting { since_ms } => Self::Deleting {
                since: at(since_ms),
            },
        }
    }
}

impl From<&Intent> for FileIntent {
    fn from(intent: &Intent) -> Self {
        let ms =
            |since: &BootInstant| u64::try_from(since.since_boot().as_millis()).unwrap_or(u64::MAX);
        match intent {
            Intent::Out => Self::Out,
            Intent::Enrolling => Self::Enrolling,
            Intent::Adopted => Self::Inherited,
            Intent::Legacy { .. } => Self::Legacy,
            Intent::Enrolled { fingerprint } => Self::Enrolled {
                fingerprint: fingerprint.clone(),
            },
            Intent::Announcing => Self::Announcing,
            Intent::Leaving { since } => Self::Leaving {
                since_ms: ms(since),
            },
            Intent::Draining { since } => Self::Draining {
                since_ms: ms(since),
            },
            Intent::Deleting { since } => Self::Deleting {
                since_ms: ms(since),
            },
        }
    }
}
