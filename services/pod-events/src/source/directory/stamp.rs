//! Whether a file says what it said: by what it looks like, so that it need not be read.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What a file looks like. Every write changes its time of change, which nobody can set back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// How long ago a file must have changed. A file system counts time in ticks: two writes in one tick look alike, and a
/// tick has at most two seconds (FAT).
const SETTLED: Duration = Duration::from_secs(3);

impl Stamp {
    /// What the file at a path looks like; `None` where another change of it might look the same.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let stamp = Self::now(path)?;
        stamp.is_settled(SystemTime::now()).then_some(stamp)
    }

    fn now(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            size: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let seconds = u64::try_from(self.changed.0).unwrap_or_default();
        let changed = UNIX_EPOCH + Duration::from_secs(seconds);
        now.duration_since(changed).is_ok_and(|age| age > SETTLED)
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
        let stamp = Stamp::now(&path).unwrap();
        let changed = UNIX_EPOCH + Duration::from_secs(stamp.changed.0.try_into().unwrap());
        for (age, settled) in [(0, false), (3, false), (5, true)] {
            let now = changed + Duration::from_secs(age);
            assert_eq!(stamp.is_settled(now), settled, "{age}");
        }
        assert!(!stamp.is_settled(changed - Duration::from_secs(60)));
        assert_eq!(Stamp::of(&path), None);
    }

    #[test]
    fn another_file_and_another_content_look_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.yaml");
        fs::write(&path, "a").unwrap();
        let before = Stamp::now(&path).unwrap();
        assert_eq!(Stamp::now(&path), Some(before));
        fs::write(&path, "ab").unwrap();
        let longer = Stamp::now(&path).unwrap();
        assert_ne!(longer, before);
        fs::write(dir.path().join("other"), "ab").unwrap();
        fs::rename(dir.path().join("other"), &path).unwrap();
        assert_ne!(Stamp::now(&path), Some(longer));
    }
}
