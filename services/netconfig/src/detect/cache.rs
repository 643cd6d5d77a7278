//! The detection cache, valid for one boot.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::Evidence;
use crate::backend::Backend;

/// ID of the current boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

const SCHEMA: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Detection {
    #[serde(with = "by_name")]
    pub(super) backend: Backend,
    pub(super) evidence: Evidence,
}

#[derive(Serialize, Deserialize)]
struct Content {
    schema: u32,
    boot_id: String,
    #[serde(flatten)]
    detection: Detection,
}

/// The file `backend.json` in a directory.
#[derive(Debug)]
pub(super) struct DetectionCache(PathBuf);

impl DetectionCache {
    pub(super) fn in_directory(directory: &Path) -> Self {
        Self(directory.join("backend.json"))
    }

    /// Returns `None` unless of this boot and this format.
    pub(super) fn read(&self) -> Option<Detection> {
        let bytes = fs::read(&self.0).ok()?;
        let content: Content = serde_json::from_slice(&bytes).ok()?;
        let is_ours = content.schema == SCHEMA && Some(content.boot_id) == boot_id().ok();
        is_ours.then_some(content.detection)
    }

    /// Writes atomically. If it fails, the next start detects again.
    pub(super) fn write(&self, detection: &Detection) {
        if let Err(error) = self.try_write(detection) {
            let path = self.0.display();
            tracing::warn!(%path, %error, "Cannot write the cache of backend detection");
        }
    }

    fn try_write(&self, detection: &Detection) -> io::Result<()> {
        let content = Content {
            schema: SCHEMA,
            boot_id: boot_id()?,
            detection: detection.clone(),
        };
        let new = self.0.with_extension("json.new");
        fs::write(&new, serde_json::to_vec_pretty(&content)?)?;
        fs::rename(new, &self.0)
    }
}

pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

mod by_name {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use super::Backend;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    pub(super) fn serialize<S: Serializer>(
        backend: &Backend,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(backend.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Backend, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut all = Backend::ALL.into_iter();
        all.find(|backend| backend.name() == text)
            .ok_or_else(|| D::Error::custom(format!("no backend is named {text}")))
    }
}
