//! Files that are there whole or not at all, also after a power failure, and whose owners lose nothing.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

/// What a file is called while it is written: no runtime loads it.
const ENDING: &str = ".inpod.tmp";

/// Why a file was not replaced.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplaceError {
    /// It holds something else than was read of it.
    #[error("it was changed at the same moment")]
    Raced,
    /// It cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Puts a file of our own in place; nobody else may read it.
pub(crate) fn put(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    put_with(dir, name, content, None)
}

/// Puts a file in place, with the permissions that it had before.
pub(crate) fn put_with(
    dir: &Path,
    name: &str,
    content: &[u8],
    mode: Option<u32>,
) -> io::Result<()> {
    let aside = aside(dir, name);
    let written = write(&aside, content, None).and_then(|()| match mode {
        Some(mode) => fs::set_permissions(&aside, Permissions::from_mode(mode & 0o7777)),
        None => Ok(()),
    });
    let put = written.and_then(|()| fs::rename(&aside, dir.join(name)));
    kept(put, &aside)?;
    sync(dir)
}

/// Replaces a file that holds what is expected; its mode and owner stay. What its owner puts there at the same moment is
/// not lost: the two files change places, and what comes out is looked at.
pub(crate) fn replace(
    dir: &Path,
    name: &str,
    expected: &[u8],
    content: &[u8],
) -> Result<(), ReplaceError> {
    let (aside, target) = (aside(dir, name), dir.join(name));
    let replaced = replace_by(&aside, &target, expected, content);
    kept(replaced, &aside)?;
    // What came out.
    remove(&aside)?;
    sync(dir)?;
    Ok(())
}

fn replace_by(
    aside: &Path,
    target: &Path,
    expected: &[u8],
    content: &[u8],
) -> Result<(), ReplaceError> {
    let found = match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ReplaceError::Raced),
        other => other?,
    };
    write(aside, content, Some(&found))?;
    match exchange(aside, target) {
        Ok(()) => {}
        // A file system that cannot do it (NFS, some FUSE): then the last moment before counts.
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOSYS) => {
            if fs::read(target)? != expected {
                return Err(ReplaceError::Raced);
            }
            return Ok(fs::rename(aside, target)?);
        }
        Err(nix::errno::Errno::ENOENT) => return Err(ReplaceError::Raced),
        Err(error) => return Err(io::Error::from(error).into()),
    }
    if fs::read(aside)? == expected {
        return Ok(());
    }
    // What its owner put there goes back; if he was there again meanwhile, what he put there last.
    exchange(aside, target).map_err(io::Error::from)?;
    if fs::read(aside)? != content {
        exchange(aside, target).map_err(io::Error::from)?;
    }
    Err(ReplaceError::Raced)
}

fn exchange(one: &Path, other: &Path) -> nix::Result<()> {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)
}

/// Takes a file away that may be gone already.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Takes a file away for good.
pub(crate) fn remove_synced(dir: &Path, name: &str) -> io::Result<()> {
    remove(&dir.join(name))?;
    sync(dir)
}

/// Takes away what a killed writer has left in a directory.
pub(crate) fn sweep(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(ENDING) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The rename itself is on disk only when its directory is.
pub(crate) fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

pub(crate) fn aside(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}{ENDING}"))
}

/// Writes a file, for us alone or with the mode and the owner of another.
fn write(path: &Path, content: &[u8], like: Option<&fs::Metadata>) -> io::Result<()> {
    remove(path)?;
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    if let Some(like) = like {
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (like.uid(), like.gid()) {
            keep_owner(&file, like)?;
        }
        file.set_permissions(Permissions::from_mode(like.mode() & 0o7777))?;
    }
    file.sync_all()
}

/// Without the capability for it (`CAP_CHOWN`) the file becomes ours: a runtime reads it as root all the same.
fn keep_owner(file: &File, like: &fs::Metadata) -> io::Result<()> {
    match fchown(file, Some(like.uid()), Some(like.gid())) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!(
                uid = like.uid(),
                gid = like.gid(),
                "Cannot keep a file's owner"
            );
            Ok(())
        }
        result => result,
    }
}

/// What is left aside of an act that failed would only be cleaned up later; the first error is the one to tell.
pub(crate) fn kept<T, E>(result: Result<T, E>, aside: &Path) -> Result<T, E> {
    if result.is_err() {
        let _ignored = fs::remove_file(aside);
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
        put(dir.path(), "own", b"x").unwrap();
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
        sweep(dir.path()).unwrap();
        assert_eq!(names(dir.path()), [".c.tmp", "b.inpod.tmp"]);
        sweep(&dir.path().join("none")).unwrap();
    }
}
