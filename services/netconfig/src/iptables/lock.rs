//! Locks of one netns: a new netconfig must not read rules that a dying program of a killed one is still writing.
//!
//! Files on tmpfs below the run directory, while needed. The kernel releases a lock with its last holder.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use inpod_linux::Netns;

use crate::backend::ProgramError;

/// flock(2) has no deadline, so it is retried.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// The lock of a netns while iptables programs read or write in it.
#[derive(Debug)]
pub(super) struct Session {
    base: PathBuf,
    _lock: File,
}

impl Session {
    pub(super) fn open(
        directory: &Path,
        netns: &Netns,
        timeout: Duration,
    ) -> Result<Self, ProgramError> {
        let id = netns.id();
        let base = directory.join(format!("{}-{}", id.inode, id.cookie));
        let path = with_extension(&base, "lock");
        let lock = acquire_lock(&path, Instant::now() + timeout).map_err(|source| {
            let lock = path.display().to_string();
            if source.kind() == io::ErrorKind::WouldBlock {
                ProgramError::Locked { lock }
            } else {
                ProgramError::Lock { path, source }
            }
        })?;
        Ok(Self { base, _lock: lock })
    }

    /// Returns the lock that the running program itself holds, as it may briefly outlive this process.
    pub(super) fn program_lock(&self) -> PathBuf {
        with_extension(&self.base, "program")
    }

    /// Returns the lock for iptables-legacy, whose default is one file for all netns, including the node's.
    pub(super) fn xtables_lock(&self) -> PathBuf {
        with_extension(&self.base, "xtables")
    }
}

/// Files locked by another process stay: it would not notice a new file in their place.
impl Drop for Session {
    fn drop(&mut self) {
        for path in [self.program_lock(), self.xtables_lock()] {
            remove_if_free(&path);
        }
        let own = with_extension(&self.base, "lock");
        drop(fs::remove_file(own));
    }
}

/// Removes files that a killed netconfig left.
pub(super) fn prepare(directory: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory)?;
    for entry in fs::read_dir(directory)? {
        remove_if_free(&entry?.path());
    }
    Ok(())
}

/// Creates the file if necessary. `WouldBlock` after the deadline.
pub(super) fn acquire_lock(path: &Path, deadline: Instant) -> io::Result<File> {
    loop {
        let file = open(path)?;
        match file.try_lock() {
            // If the previous holder removed the file, the lock has no effect.
            Ok(()) if is_same_file(&file, path) => return Ok(file),
            Ok(()) => continue,
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Err(TryLockError::WouldBlock) => thread::sleep(RETRY_INTERVAL),
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.open(path)
}

fn is_same_file(file: &File, path: &Path) -> bool {
    let (Ok(held), Ok(found)) = (file.metadata(), fs::metadata(path)) else {
        return false;
    };
    (held.dev(), held.ino()) == (found.dev(), found.ino())
}

/// While locked here, no other process can lock it.
fn remove_if_free(path: &Path) {
    let file = OpenOptions::new().write(true).open(path);
    if let Ok(file) = file
        && file.try_lock().is_ok()
        && let Err(error) = fs::remove_file(path)
    {
        tracing::debug!(path = %path.display(), %error, "Cannot remove a lock file");
    }
}

fn with_extension(base: &Path, extension: &str) -> PathBuf {
    let mut path = OsString::from(base);
    path.push(".");
    path.push(extension);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_held_is_waited_for_until_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lock");
        let held = acquire_lock(&path, Instant::now()).unwrap();
        let deadline = Instant::now() + Duration::from_millis(20);
        let error = acquire_lock(&path, deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(Instant::now() >= deadline);
        // A child that another test forks holds a copy of the descriptor until it executes its program.
        held.unlock().unwrap();
        acquire_lock(&path, Instant::now()).unwrap();
    }

    #[test]
    fn a_lock_that_was_removed_by_its_holder_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lock");
        let held = acquire_lock(&path, Instant::now()).unwrap();
        thread::scope(|scope| {
            let waiting = scope
                .spawn(|| acquire_lock(&path, Instant::now() + Duration::from_secs(20)).unwrap());
            // Waiting or not, it must end with the file that exists.
            fs::remove_file(&path).unwrap();
            drop(held);
            assert!(is_same_file(&waiting.join().unwrap(), &path));
        });
    }

    #[test]
    fn what_is_left_is_removed_and_what_is_held_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (left, held) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&left, "").unwrap();
        let _held = acquire_lock(&held, Instant::now()).unwrap();
        prepare(directory.path()).unwrap();
        assert_eq!((left.exists(), held.exists()), (false, true));
    }
}
