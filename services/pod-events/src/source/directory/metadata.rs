//! Detects unchanged files by metadata to avoid rereading them.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The metadata that identifies a file's content. Every write updates ctime, which cannot be set back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileMetadata {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The minimum age of the last change. File systems count time in ticks of up to two seconds (FAT), and two writes
/// within a tick leave the same metadata.
const MIN_AGE: Duration = Duration::from_secs(3);

impl FileMetadata {
    /// Returns `None` if a further write might leave the metadata the same.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let metadata = Self::read(path)?;
        metadata.is_settled(SystemTime::now()).then_some(metadata)
    }

    fn read(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let seconds = u64::try_from(self.changed.0).unwrap_or_default();
        let changed = UNIX_EPOCH + Duration::from_secs(seconds);
        now.duration_since(changed).is_ok_and(|age| age > MIN_AGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changed_just_now_or_in_the_future_may_change_again_unseen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.yaml");
        fs::write(&path, "a").unwrap();
        let metadata = FileMetadata::read(&path).unwrap();
        let changed = UNIX_EPOCH + Duration::from_secs(metadata.changed.0.try_into().unwrap());
        for (age, settled) in [(0, false), (3, false), (5, true)] {
            let now = changed + Duration::from_secs(age);
            assert_eq!(metadata.is_settled(now), settled, "{age}");
        }
        assert!(!metadata.is_settled(changed - Duration::from_secs(60)));
        assert_eq!(FileMetadata::of(&path), None);
    }

    #[test]
    fn another_file_and_another_content_have_other_metadata() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.yaml");
        fs::write(&path, "a").unwrap();
        let before = FileMetadata::read(&path).unwrap();
        assert_eq!(FileMetadata::read(&path), Some(before));
        fs::write(&path, "ab").unwrap();
        let longer = FileMetadata::read(&path).unwrap();
        assert_ne!(longer, before);
        fs::write(dir.path().join("other"), "ab").unwrap();
        fs::rename(dir.path().join("other"), &path).unwrap();
        assert_ne!(FileMetadata::read(&path), Some(longer));
    }
}
