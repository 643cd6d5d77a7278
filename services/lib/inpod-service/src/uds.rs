//! Unix sockets: a directory of their own, no stale one in the way, no live one taken over, nobody else's to open.

use std::{
    fs, io,
    os::unix::fs::{
        DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
        PermissionsExt as _,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use tokio::net::UnixListener;

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The kernel takes at most 107 bytes (unix(7)).
    #[error("socket path {} has {} bytes, more than 107; choose a shorter run_dir", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// Something that is no socket stands at the path.
    #[error("{} is in the way: it is no socket; remove it", .0.display())]
    NoSocket(PathBuf),
    /// Another process listens there.
    #[error("{} is already served by another process; stop it first", .0.display())]
    Served(PathBuf),
    /// Another process is about to listen there, or hangs in the middle of it.
    #[error("another process is starting to listen in {} and does not finish; stop it first", .0.display())]
    Starting(PathBuf),
    /// What should be a directory of its own is something else. A link is not followed: what it leads to would be
    /// closed to everybody.
    #[error("{} is no directory: it is a file or a symbolic link; remove it", .0.display())]
    NoDirectory(PathBuf),
    /// The directory is another user's, who could put sockets of his own there.
    #[error("directory {} belongs to uid {owner}, not to this process; remove it or choose another run_dir", .path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
    },
    /// Others may change the directory, and it is not the socket's alone: closing it would shut them out.
    #[error("others may write to directory {} (mode {mode:o}), which holds more than the socket; choose one of its own", .path.display())]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The directory cannot be made or restricted.
    #[error("cannot prepare directory {}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The socket cannot be made.
    #[error("cannot listen on {}", .path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Listens on a stream socket that only this user may open.
///
/// # Errors
///
/// See [`BindError`].
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let lock = prepare(path, SockType::Stream)?;
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    let listener = UnixListener::bind(path).map_err(listen)?;
    drop(lock);
    restrict_socket(path)?;
    Ok(listener)
}

/// The way to a socket is free, and nobody else may take it: for as long as this lives other starts wait.
#[derive(Debug)]
#[must_use = "another start could take the way as soon as this is dropped: listen first"]
pub struct SocketLock(Flock<fs::File>);

/// How long another start may take.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Makes the way free for a socket: its directory is there (0700 if it had to be made; one that is shared with others,
/// like `/run`, is left as it is), and what a dead process left is gone. Of two starts at once the second finds the
/// first one's socket: it waits for the [`SocketLock`], which is to be held until the socket is listened on.
///
/// # Errors
///
/// See [`BindError`].
pub fn prepare(path: &Path, kind: SockType) -> Result<SocketLock, BindError> {
    if path.as_os_str().len() > 107 {
        return Err(BindError::TooLong(path.to_owned()));
    }
    let parent = path.parent().unwrap_or_else(|| Path::new("/"));
    if !parent.exists() {
        create_private_directory(parent)?;
    }
    let lock = lock_directory(parent)?;
    remove_stale(path, kind)?;
    Ok(lock)
}

fn lock_directory(directory: &Path) -> Result<SocketLock, BindError> {
    let file = fs::File::open(directory);
    let starting = || BindError::Starting(directory.to_owned());
    lock_within_timeout(file, directory, starting)
}

/// Makes this process the only one of its kind: it holds the directory for as long as the value lives. One that is
/// about to end is waited for, so that its last effects do not mix with the first ones of its successor.
///
/// # Errors
///
/// When another process has it, or it cannot be had.
pub(crate) fn lock_instance(directory: &Path) -> Result<SocketLock, BindError> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let path = directory.join("lock");
    loop {
        let served = || BindError::Served(directory.to_owned());
        let lock = lock_within_timeout(options.open(&path), directory, served)?;
        // The one that was waited for may have emptied the directory: the next start would lock another file.
        if lock.is_at(&path) {
            return Ok(lock);
        }
    }
}

impl SocketLock {
    /// Whether what is locked stands there.
    fn is_at(&self, path: &Path) -> bool {
        let found = fs::metadata(path).and_then(|there| Ok((there, self.0.metadata()?)));
        found
            .is_ok_and(|(there, locked)| (there.dev(), there.ino()) == (locked.dev(), locked.ino()))
    }
}

/// Removes what is in a directory, if there is one. The directory itself may be a mount, and stays.
///
/// # Errors
///
/// When something in it cannot be removed.
pub fn clear_directory(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        let remove = match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all,
            false => fs::remove_file,
        };
        remove(entry.path())?;
    }
    Ok(())
}

/// Removes a socket that this process has ceased to serve. One that is served is another's by now.
///
/// # Errors
///
/// See [`BindError`].
pub fn remove_socket(path: &Path, kind: SockType) -> Result<(), BindError> {
    match remove_stale(path, kind) {
        Err(BindError::Served(_)) => Ok(()),
        other => other,
    }
}

/// Locks a file that belongs to a directory; the kernel lets go of it with the process.
fn lock_within_timeout(
    file: io::Result<fs::File>,
    directory: &Path,
    late: impl FnOnce() -> BindError,
) -> Result<SocketLock, BindError> {
    let error = |source: io::Error| BindError::Directory {
        path: directory.to_owned(),
        source,
    };
    let mut file = file.map_err(error)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(SocketLock(lock)),
            Err((_, nix::Error::EWOULDBLOCK)) if Instant::now() >= deadline => return Err(late()),
            Err((same, nix::Error::EWOULDBLOCK)) => file = same,
            Err((_, cause)) => return Err(error(cause.into())),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Removes what a dead process left at the path of a socket.
fn remove_stale(path: &Path, kind: SockType) -> Result<(), BindError> {
    let Ok(found) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !found.file_type().is_socket() {
        return Err(BindError::NoSocket(path.to_owned()));
    }
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    if is_served(path, kind).map_err(listen)? {
        return Err(BindError::Served(path.to_owned()));
    }
    fs::remove_file(path).map_err(listen)
}

/// Makes a directory that only this user may enter; one that is there already is restricted.
///
/// # Errors
///
/// When it cannot be made or restricted.
pub fn create_private_directory(path: &Path) -> Result<(), BindError> {
    let error = |source| BindError::Directory {
        path: path.to_owned(),
        source,
    };
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    let found = match (fs::symlink_metadata(path), made) {
        (Ok(found), _) => found,
        (Err(_), Err(cause)) | (Err(cause), Ok(())) => return Err(error(cause)),
    };
    if !found.is_dir() {
        return Err(BindError::NoDirectory(path.to_owned()));
    }
    if found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(BindError::Foreign {
            path: path.to_owned(),
            owner: found.uid(),
        });
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(error)
}

/// Who may enter the directory of a socket, once it was seen to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryAccess {
    /// This user alone, as before.
    AlreadyPrivate,
    /// This user alone, now. These were its permissions.
    Restricted(u32),
    /// Others too, since more is in it than the socket, which they may see and neither open nor replace.
    Shared(u32),
}

/// Sees to it that only this user may enter the directory of a socket. One that others may enter is restricted where
/// nothing but the socket is in it, as kubelet makes one for a `hostPath` of type `DirectoryOrCreate` (0755); any other,
/// like `/run`, is somebody else's too and is left.
///
/// # Errors
///
/// When others may put a socket of theirs in place of this one, or it cannot be restricted.
pub fn restrict_directory(socket: &Path) -> Result<DirectoryAccess, BindError> {
    let parent = socket.parent().unwrap_or_else(|| Path::new("/"));
    let error = |source| BindError::Directory {
        path: parent.to_owned(),
        source,
    };
    let found = fs::metadata(parent).map_err(error)?;
    if found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(BindError::Foreign {
            path: parent.to_owned(),
            owner: found.uid(),
        });
    }
    let mode = found.mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(DirectoryAccess::AlreadyPrivate);
    }
    for entry in fs::read_dir(parent).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        if Some(name.as_os_str()) != socket.file_name() {
            return shared(parent, mode);
        }
    }
    create_private_directory(parent).map(|()| DirectoryAccess::Restricted(mode))
}

fn shared(directory: &Path, mode: u32) -> Result<DirectoryAccess, BindError> {
    if mode & 0o022 == 0 {
        return Ok(DirectoryAccess::Shared(mode));
    }
    Err(BindError::Writable {
        path: directory.to_owned(),
        mode,
    })
}

/// Lets only this user open a socket.
///
/// # Errors
///
/// When the mode cannot be set.
pub fn restrict_socket(path: &Path) -> Result<(), BindError> {
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(listen)
}

/// Whether somebody listens. Connecting is the only way to know; what they see is a peer that leaves at once.
fn is_served(path: &Path, kind: SockType) -> io::Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, kind, flags, None)?;
    use std::os::fd::AsRawFd as _;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) | Err(nix::Error::EAGAIN) => Ok(true),
        // Of another type: still somebody's.
        Err(nix::Error::EPROTOTYPE) => Ok(true),
        Err(nix::Error::ECONNREFUSED | nix::Error::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
