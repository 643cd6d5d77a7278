//! Record of the changes made on the host, for their removal. Written before the first change; survives reboots.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::{error::RecordError, files};

/// File name in the record's directory.
pub const FILE: &str = "record.json";

const SCHEMA: u32 = 1;

/// All changes that inpod has made on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// CNI directory as a path of the host; empty if no file was changed.
    pub conf_dir: String,
    /// Changed files of the CNI directory, by name.
    pub files: BTreeMap<String, ChangedFile>,
    /// Path of the plugin on the host, if inpod installed it.
    pub binary: Option<String>,
}

/// A changed file of the CNI directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    /// Content before the change; none if the file did not exist.
    pub before: Option<Content>,
    /// Content after the change; none if inpod removed the file.
    pub ours: Option<Content>,
    /// Mode before the change; none if the file did not exist.
    pub mode: Option<u32>,
    /// Whether the file belongs entirely to inpod, by its name.
    pub own: bool,
    /// Entry of istio-cni that inpod's entry replaced.
    #[serde(rename = "incumbent")]
    pub istio_entry: Option<Content>,
}

/// Content of a file, which need not be UTF-8.
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
    /// Reads the record; returns an empty one if the file does not exist.
    ///
    /// # Errors
    ///
    /// If it cannot be read or parsed, or has a later schema. The file is never discarded, since that
    /// would forget the changes.
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

    /// Writes the record atomically and durably.
    ///
    /// # Errors
    ///
    /// If it cannot be written; the previous record remains.
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

    /// Removes the record, if it exists.
    ///
    /// # Errors
    ///
    /// If it exists and cannot be removed.
    pub fn remove(dir: &Path) -> Result<(), RecordError> {
        let path = dir.join(FILE);
        files::remove(&path).map_err(|source| RecordError::Write { path, source })
    }

    /// Returns whether no change is recorded.
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
