//! Changes files atomically and durably, without losing a concurrent change by the owner of a file.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, fchown},
    path::Path,
};

use inpod_service::{read_bounded_nofollow, remove_if_exists};
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, RenameFlags, renameat2},
};
use tempfile::TempPath;

use crate::directory::{MAX_BYTES, is_missing};

/// The suffix of temporary files, which no runtime loads.
const TEMPORARY_SUFFIX: &str = ".inpod.tmp";

pub(crate) fn create_private_directory(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes a file with the given mode.
pub(crate) fn write(dir: &Path, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
    let temporary = write_temporary(dir, name, content, |file| set_mode(file, mode))?;
    rename(temporary, dir, name)
}

/// Replaces a file, and keeps its mode and owner. The new and the old file are exchanged and the old file is verified
/// afterwards, so that no write of the owner is lost. Returns false if the file did not have the expected content.
pub(crate) fn replace(dir: &Path, name: &str, expected: &[u8], content: &[u8]) -> io::Result<bool> {
    let target = dir.join(name);
    let found = fs::metadata(&target)?;
    let temporary = write_temporary(dir, name, content, |file| copy_attributes(file, &found))?;
    match exchange(&temporary, &target) {
        Ok(()) => {}
        // File systems without support for the exchange (NFS, some FUSE): compare the content just before the rename.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            let is_expected = is_content(&target, expected);
            if is_expected {
                rename(temporary, dir, name)?;
            }
            return Ok(is_expected);
        }
        Err(error) => return Err(error.into()),
    }
    // After the exchange, the temporary name holds the old content.
    if is_content(&temporary, expected) {
        sync_dir(dir)?;
        return Ok(true);
    }
    // Restores the owner's content. If the owner wrote again in the meantime, the last write wins.
    exchange(&temporary, &target)?;
    if !is_content(&temporary, content) {
        exchange(&temporary, &target)?;
    }
    Ok(false)
}

fn exchange(one: &Path, other: &Path) -> nix::Result<()> {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)
}

/// Removes a file. Returns false if the file did not have the expected content, if there is any expectation.
pub(crate) fn remove(dir: &Path, name: &str, expected: Option<&[u8]>) -> io::Result<bool> {
    let target = dir.join(name);
    let Some(expected) = expected else {
        remove_if_exists(&target)?;
        sync_dir(dir)?;
        return Ok(true);
    };
    let temporary = write_temporary(dir, name, &[], |_| Ok(()))?;
    fs::rename(&target, &temporary)?;
    if is_content(&temporary, expected) {
        sync_dir(dir)?;
        return Ok(true);
    }
    // The owner's newer file goes back, unless the owner has written again.
    let flags = RenameFlags::RENAME_NOREPLACE;
    match renameat2(AT_FDCWD, &*temporary, AT_FDCWD, &target, flags) {
        Ok(()) | Err(Errno::EEXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether the file is regular and has the content.
fn is_content(path: &Path, expected: &[u8]) -> bool {
    read_bounded_nofollow(path, MAX_BYTES).is_ok_and(|found| found == expected)
}

/// Removes the temporary files that a killed installer left behind.
pub(crate) fn remove_temporaries(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if is_missing(&error) => return Ok(()),
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

/// Writes and syncs a file beside its target, which is removed unless the file is renamed.
pub(crate) fn write_temporary(
    dir: &Path,
    name: &str,
    content: &[u8],
    set_attributes: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<TempPath> {
    let prefix = format!(".{name}");
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix(&prefix).suffix(TEMPORARY_SUFFIX);
    let mut file = builder.tempfile_in(dir)?;
    file.write_all(content)?;
    set_attributes(file.as_file())?;
    file.as_file().sync_all()?;
    Ok(file.into_temp_path())
}

pub(crate) fn rename(temporary: TempPath, dir: &Path, name: &str) -> io::Result<()> {
    temporary.persist(dir.join(name))?;
    sync_dir(dir)
}

/// Sets the mode of an open file, which the umask would restrict when the file is created.
pub(crate) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(mode & 0o7777))
}

/// Gives the file the mode and the owner of the original. Without `CAP_CHOWN` the file stays with this user, because
/// runtimes read as root anyway.
fn copy_attributes(file: &File, original: &fs::Metadata) -> io::Result<()> {
    let (uid, gid) = (original.uid(), original.gid());
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (uid, gid) {
        match fchown(file, Some(uid), Some(gid)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!(uid, gid, "Cannot keep the owner of a file");
            }
            result => result?,
        }
    }
    set_mode(file, original.mode())
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
        assert!(replace(dir.path(), "10-a.conflist", b"old", b"new").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        write(dir.path(), "own", b"x", 0o600).unwrap();
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
        assert!(!replace(dir.path(), "a.conflist", b"old", b"ours").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        fs::remove_file(&path).unwrap();
        let error = replace(dir.path(), "a.conflist", b"old", b"ours").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
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
