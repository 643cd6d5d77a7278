//! Records changes on the host before they are made, for their removal; survives reboots.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::{error::RecordError, files};

pub const FILE: &str = "record.json";

const SCHEMA: u32 = 1;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// A host path; empty without changes.
    pub conf_dir: String,
    /// By name, in the CNI directory.
    pub files: BTreeMap<String, ChangedFile>,
    /// A host path, if inpod installed it.
    pub binary: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    /// Before the change; none if the file did not exist.
    pub before: Option<Content>,
    /// After the change; none if inpod removed the file.
    pub ours: Option<Content>,
    /// Before the change; none if the file did not exist.
    pub mode: Option<u32>,
    /// The file belongs entirely to inpod, by its name.
    pub own: bool,
    /// The entry that inpod's replaced.
    #[serde(rename = "incumbent")]
    pub istio_entry: Option<Content>,
}

/// A file's content, not necessarily UTF-8.
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
    /// Returns an empty record without a file.
    ///
    /// # Errors
    ///
    /// If it is unusable or has a later schema. The file is never discarded, since that would forget the changes.
    pub fn read(dir: &Path) -> Result<Self, RecordError> {
        let path = dir.join(FILE);
        let text = match fs::read(&path) {
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

    /// Writes atomically and durably.
    ///
    /// # Errors
    ///
    /// The previous record remains.
    pub fn write(&self, dir: &Path) -> Result<(), RecordError> {
        let record = Self {
            schema: SCHEMA,
            ..self.clone()
        };
        let path = dir.join(FILE);
        let written = serde_json::to_vec_pretty(&record)
            .map_err(io::Error::other)
            .and_then(|text| files::write_private(dir, FILE, &text));
        written.map_err(|source| RecordError::Write { path, source })
    }

    pub fn remove(dir: &Path) -> Result<(), RecordError> {
        let path = dir.join(FILE);
        files::remove(&path).map_err(|source| RecordError::Write { path, source })
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.binary.is_none()
    }
}

#[cfg(test)]
mod tests {
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
