//! Changes files atomically and durably, without losing a concurrent change by the owner of a file.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

use inpod_service::remove_if_exists;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

/// The suffix of temporary files, which no runtime loads.
const TEMPORARY_SUFFIX: &str = ".inpod.tmp";

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplaceError {
    /// The file does not have the expected content.
    #[error("it was changed at the same time")]
    Raced,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Writes a file with mode 0600.
pub(crate) fn write_private(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    write_with_mode(dir, name, content, None)
}

/// Writes a file with the given mode, which an earlier file of this name had.
pub(crate) fn write_with_mode(
    dir: &Path,
    name: &str,
    content: &[u8],
    mode: Option<u32>,
) -> io::Result<()> {
    let temporary = temporary_path(dir, name);
    let written = write_synced(&temporary, content, |file| match mode {
        Some(mode) => file.set_permissions(Permissions::from_mode(mode & 0o7777)),
        None => Ok(()),
    });
    let put = written.and_then(|()| fs::rename(&temporary, dir.join(name)));
    remove_on_error(put, &temporary)?;
    sync_dir(dir)
}

/// Replaces a file that has the expected content, and keeps its mode and owner. The new and the old file are exchanged
/// and the old file is verified afterwards, so that no write of the owner is lost.
pub(crate) fn replace(
    dir: &Path,
    name: &str,
    expected: &[u8],
    content: &[u8],
) -> Result<(), ReplaceError> {
    let (temporary, target) = (temporary_path(dir, name), dir.join(name));
    let replaced = exchange_or_rename(&temporary, &target, expected, content);
    remove_on_error(replaced, &temporary)?;
    // After the exchange, the temporary name holds the old content.
    remove_if_exists(&temporary)?;
    sync_dir(dir)?;
    Ok(())
}

fn exchange_or_rename(
    temporary: &Path,
    target: &Path,
    expected: &[u8],
    content: &[u8],
) -> Result<(), ReplaceError> {
    let found = match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ReplaceError::Raced),
        other => other?,
    };
    write_synced(temporary, content, |file| copy_attributes(file, &found))?;
    match exchange(temporary, target) {
        Ok(()) => {}
        // File systems without support for the exchange (NFS, some FUSE): compare the content just before the rename.
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOSYS) => {
            if fs::read(target)? != expected {
                return Err(ReplaceError::Raced);
            }
            return Ok(fs::rename(temporary, target)?);
        }
        Err(nix::errno::Errno::ENOENT) => return Err(ReplaceError::Raced),
        Err(error) => return Err(io::Error::from(error).into()),
    }
    if fs::read(temporary)? == expected {
        return Ok(());
    }
    // Restores the owner's content. If the owner wrote again in the meantime, the last write wins.
    exchange(temporary, target).map_err(io::Error::from)?;
    if fs::read(temporary)? != content {
        exchange(temporary, target).map_err(io::Error::from)?;
    }
    Err(ReplaceError::Raced)
}

fn exchange(one: &Path, other: &Path) -> nix::Result<()> {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)
}

pub(crate) fn remove_synced(dir: &Path, name: &str) -> io::Result<()> {
    remove_if_exists(&dir.join(name))?;
    sync_dir(dir)
}

/// Removes the temporary files that a killed installer left behind.
pub(crate) fn remove_temporaries(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(TEMPORARY_SUFFIX) {
            remove_if_exists(&entry.path())?;
        }
    }
    Ok(())
}

/// Makes a rename durable, by an fsync of the directory.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

pub(crate) fn temporary_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}{TEMPORARY_SUFFIX}"))
}

/// Writes and syncs a file with mode 0600, to which `set_attributes` may then give other attributes.
pub(crate) fn write_synced(
    path: &Path,
    content: &[u8],
    set_attributes: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    remove_if_exists(path)?;
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    set_attributes(&file)?;
    file.sync_all()
}

/// Gives the file the mode and the owner of the original.
fn copy_attributes(file: &File, original: &fs::Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (original.uid(), original.gid()) {
        restore_owner(file, original)?;
    }
    file.set_permissions(Permissions::from_mode(original.mode() & 0o7777))
}

/// Gives the file to its original owner. Without `CAP_CHOWN` the file stays with this user, because runtimes read as
/// root anyway.
fn restore_owner(file: &File, original: &fs::Metadata) -> io::Result<()> {
    match fchown(file, Some(original.uid()), Some(original.gid())) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!(
                uid = original.uid(),
                gid = original.gid(),
                "Cannot keep the owner of a file"
            );
            Ok(())
        }
        result => result,
    }
}

/// Removes the temporary file if the result is an error. The removal is a best effort: later runs remove leftovers, and
/// the first error is the error to report.
pub(crate) fn remove_on_error<T, E>(result: Result<T, E>, temporary: &Path) -> Result<T, E> {
    if result.is_err() {
        let _ignored = fs::remove_file(temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_with_its_mode_and_nothing_is_left_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("10-a.conflist");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        replace(dir.path(), "10-a.conflist", b"old", b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        write_private(dir.path(), "own", b"x").unwrap();
        assert_eq!(
            fs::metadata(dir.path().join("own")).unwrap().mode() & 0o7777,
            0o600
        );
        assert_eq!(names(dir.path()), ["10-a.conflist", "own"]);
    }

    #[test]
    fn what_an_owner_wrote_meanwhile_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.conflist");
        fs::write(&path, "newer").unwrap();
        let raced = replace(dir.path(), "a.conflist", b"old", b"ours");
        assert!(matches!(raced, Err(ReplaceError::Raced)));
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        fs::remove_file(&path).unwrap();
        let raced = replace(dir.path(), "a.conflist", b"old", b"ours");
        assert!(matches!(raced, Err(ReplaceError::Raced)));
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn only_leftovers_of_our_own_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".a.conflist.inpod.tmp", "b.inpod.tmp", ".c.tmp"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        remove_temporaries(dir.path()).unwrap();
        assert_eq!(names(dir.path()), [".c.tmp", "b.inpod.tmp"]);
        remove_temporaries(&dir.path().join("none")).unwrap();
    }
}
