use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2},
    sys::{
        stat::{Mode, SFlag, fstat},
        statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, fstatfs},
    },
};

use crate::{
    OpenError,
    path::{Split, is_procfs_netns, split},
};

/// Opens the netns at a path, after inspecting the path without opening the file.
pub(crate) fn open(path: &Path, roots: &[PathBuf]) -> Result<OwnedFd, OpenError> {
    let split = split(path).ok_or_else(|| OpenError::NotPlain(path.to_owned()))?;
    let directory = directory_below(path, &split, roots)?;
    let found = open_last_component(path, directory.as_fd(), &split)?;
    if fstatfs(&found).map_err(io_error(path))?.filesystem_type() != NSFS_MAGIC {
        return Err(OpenError::NotANamespace(path.to_owned()));
    }
    // Opening through the descriptor opens the inspected file, wherever the path leads by now.
    let opened = File::open(by_descriptor(found.as_fd())).map_err(|source| OpenError::Io {
        path: path.to_owned(),
        source,
    })?;
    Ok(opened.into())
}

/// Opens a directory below one of the roots. Follows ordinary links such as `/var/run`, but no magic links of procfs
/// (`/proc/1/root`), because these lead into other mount namespaces.
fn directory_below(
    path: &Path,
    split: &Split<'_>,
    roots: &[PathBuf],
) -> Result<OwnedFd, OpenError> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let directory = openat2(AT_FDCWD, split.directory, how).map_err(io_error(path))?;
    let resolved =
        fs::read_link(by_descriptor(directory.as_fd())).map_err(|source| OpenError::Io {
            path: path.to_owned(),
            source,
        })?;
    if !is_below(&resolved, roots) {
        return Err(OpenError::OutsideRoots {
            path: path.to_owned(),
            roots: roots.to_vec(),
        });
    }
    Ok(directory)
}

/// Returns whether a directory is below a root. Roots are resolved, too, because `/var/run` is a link; a missing root
/// permits nothing.
fn is_below(directory: &Path, roots: &[PathBuf]) -> bool {
    let resolved = roots.iter().filter_map(|root| fs::canonicalize(root).ok());
    resolved.into_iter().any(|root| directory.starts_with(root))
}

/// Opens the last component of a path with O_PATH, which has no effect on the file.
fn open_last_component(
    path: &Path,
    directory: BorrowedFd<'_>,
    split: &Split<'_>,
) -> Result<OwnedFd, OpenError> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let open = |flags| openat(directory, split.name, flags, Mode::empty()).map_err(io_error(path));
    let found = open(flags | OFlag::O_NOFOLLOW)?;
    let mode = fstat(&found).map_err(io_error(path))?.st_mode;
    if SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits()) != SFlag::S_IFLNK {
        return Ok(found);
    }
    let procfs = fstatfs(&found).map_err(io_error(path))?.filesystem_type() == PROC_SUPER_MAGIC;
    if procfs && is_procfs_netns(split.directory, split.name) {
        return open(flags);
    }
    Err(OpenError::Symlink(path.to_owned()))
}

fn by_descriptor(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn io_error(path: &Path) -> impl Fn(nix::Error) -> OpenError {
    // ESRCH means that a process in /proc has just exited, and ENOTDIR that a component is no directory.
    const MISSING: [nix::Error; 3] = [nix::Error::ENOENT, nix::Error::ESRCH, nix::Error::ENOTDIR];
    move |errno| {
        let path = path.to_owned();
        if MISSING.contains(&errno) {
            OpenError::Missing(path)
        } else if errno == nix::Error::ELOOP {
            OpenError::Symlink(path)
        } else {
            let source = io::Error::from(errno);
            OpenError::Io { path, source }
        }
    }
}
