//! Records each change on the host before it is made, so that a removal can revert it; the record survives reboots.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use inpod_service::read_bounded_nofollow;
use serde::{Deserialize, Serialize};

use crate::{NetworkFile, files};

pub const FILE: &str = "record.json";

const SCHEMA: u32 = 1;

/// The limit of the record's size, which holds each changed file twice.
const MAX_BYTES: u64 = 32 << 20;

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a valid record of the installer, which uninstall and handover need: repair it, or remove it and revert inpod's changes by hand", .path.display())]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// A later release of inpod wrote the record.
    #[error("{} has schema {found} of a later release; run that release", .path.display())]
    Later { path: PathBuf, found: u32 },
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// The CNI configuration directory on the host; empty if nothing was changed.
    pub conf_dir: String,
    /// The changed files in `conf_dir`, by name.
    pub files: BTreeMap<String, ChangedFile>,
    /// The file in `conf_dir` whose network inpod's copy has.
    #[serde(default)]
    pub joined: Option<String>,
    /// The path of the plugin on the host, if inpod installed the plugin.
    pub binary: Option<String>,
    /// The paths at which inpod installed the plugin before, because the runtime's directory moved.
    #[serde(default)]
    pub earlier_binaries: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    /// The content before the change; `None` if the file did not exist.
    pub before: Option<Content>,
    /// The content after the change; `None` if inpod removed the file.
    pub ours: Option<Content>,
    /// The mode before the change; `None` if the file did not exist.
    pub mode: Option<u32>,
    /// The whole file belongs to inpod, by its name.
    pub own: bool,
    /// The entry of istio-cni that inpod's entry replaced.
    #[serde(rename = "incumbent")]
    pub istio_entry: Option<Content>,
}

impl ChangedFile {
    /// Returns whether no other component has changed the file since.
    pub fn is_as_left(&self, file: Option<&NetworkFile>) -> bool {
        let ours = self.ours.as_ref().map(Content::bytes);
        ours == file.map(|file| file.content.as_slice())
    }

    /// Returns the content of a file that inpod removed.
    pub fn removed(&self) -> Option<&Content> {
        self.before.as_ref().filter(|_| self.ours.is_none())
    }
}

/// The content of a file, which need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    Text(String),
    Bytes(Vec<u8>),
}

impl Content {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Content {
    fn from(bytes: &[u8]) -> Self {
        str::from_utf8(bytes).map_or_else(
            |_| Self::Bytes(bytes.to_owned()),
            |text| Self::Text(text.to_owned()),
        )
    }
}

impl Record {
    /// Reads the record; returns an empty record if the file does not exist.
    ///
    /// # Errors
    ///
    /// Fails if the record is unusable or has a later schema. The file is never discarded, because the changes would be
    /// forgotten.
    pub fn read(dir: &Path) -> Result<Self, RecordError> {
        let path = dir.join(FILE);
        let text = match read_bounded_nofollow(&path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(RecordError::Read { path, source }),
        };
        let record: Self =
            serde_json::from_slice(&text).map_err(|source| RecordError::Malformed {
                path: path.clone(),
                source,
            })?;
        if record.schema > SCHEMA {
            let found = record.schema;
            return Err(RecordError::Later { path, found });
        }
        Ok(record)
    }

    /// Writes the record atomically and durably.
    ///
    /// # Errors
    ///
    /// The previous record stays in place after an error.
    pub fn write(&self, dir: &Path) -> Result<(), RecordError> {
        let record = Self {
            schema: SCHEMA,
            ..self.clone()
        };
        let path = dir.join(FILE);
        let written = serde_json::to_vec_pretty(&record)
            .map_err(io::Error::other)
            .and_then(|text| files::write(dir, FILE, &text, 0o600));
        written.map_err(|source| RecordError::Write { path, source })
    }

    pub fn remove(dir: &Path) -> Result<(), RecordError> {
        let path = dir.join(FILE);
        inpod_service::remove_if_exists(&path).map_err(|source| RecordError::Write { path, source })
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.binary.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_written_is_read_back_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record::default();
        assert_eq!(Record::read(dir.path()).unwrap(), record);
        for (name, bytes) in [("text", &b"{\r\n}\0"[..]), ("bytes", b"\xff\xfe{}")] {
            let changed = ChangedFile {
                before: Some(bytes.into()),
                mode: Some(0o644),
                ours: None,
                own: false,
                istio_entry: None,
            };
            record.files.insert(name.to_owned(), changed);
        }
        record.write(dir.path()).unwrap();
        let read = Record::read(dir.path()).unwrap();
        assert_eq!(read.files, record.files);
        assert_eq!(
            read.files["bytes"].before.as_ref().unwrap().bytes(),
            b"\xff\xfe{}"
        );
        Record::remove(dir.path()).unwrap();
        assert!(Record::read(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn a_record_that_cannot_be_understood_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        for text in [
            "{",
            r#"{"schema":2,"conf_dir":"","files":{},"binary":null}"#,
        ] {
            fs::write(dir.path().join(FILE), text).unwrap();
            assert!(Record::read(dir.path()).is_err(), "{text}");
            assert_eq!(fs::read_to_string(dir.path().join(FILE)).unwrap(), text);
        }
    }
}
