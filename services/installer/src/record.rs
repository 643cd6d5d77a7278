//! What was changed on the host, as leaving needs it. It survives reboots and is written before the first change.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::{error::RecordError, files};

/// The file's name in the record's directory.
pub const FILE: &str = "record.json";

/// The schema that is written.
const SCHEMA: u32 = 1;

/// Everything that inpod has changed on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    schema: u32,
    /// Where the files are, as a path of the host; empty where there are none.
    pub conf_dir: String,
    /// The files of the CNI directory, by name.
    pub files: BTreeMap<String, ChangedFile>,
    /// The plugin's path on the host, if it was put there by us.
    pub binary: Option<String>,
}

/// A file of the CNI directory that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    /// What it held before us; none where there was no such file.
    pub before: Option<Content>,
    /// What we made of it; none where we took it away.
    pub ours: Option<Content>,
    /// Its permissions before us; none where there was no such file.
    pub mode: Option<u32>,
    /// Whether the file is ours altogether, by its name.
    pub own: bool,
    /// The incumbent's entry that ours took the place of.
    #[serde(rename = "incumbent")]
    pub istio_entry: Option<Content>,
}

/// A file's content, which need not be text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// As text.
    Text(String),
    /// As bytes.
    Bytes(Vec<u8>),
}

impl Content {
    /// The bytes.
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
    /// Reads the record; an empty one where there is none.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is none, or is of a later schema. It is never put aside: what was changed would be
    /// forgotten.
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

    /// Writes it, whole or not at all, also after a power failure.
    ///
    /// # Errors
    ///
    /// When it cannot be written; an earlier one is still there.
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

    /// Takes it away.
    ///
    /// # Errors
    ///
    /// When it is there and cannot be taken away.
    pub fn remove(dir: &Path) -> Result<(), RecordError> {
        let path = dir.join(FILE);
        files::remove(&path).map_err(|source| RecordError::Write { path, source })
    }

    /// Whether nothing was changed.
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
