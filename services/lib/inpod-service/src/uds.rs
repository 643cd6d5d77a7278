//! Binds Unix sockets in private directories, replacing stale sockets but never a socket in use.

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

/// Reasons why a socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path is longer than 107 bytes, the limit of unix(7).
    #[error("socket path {} has {} bytes, more than 107; choose a shorter run_dir", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// The path leads to a file other than a socket.
    #[error("{} is in the way: it is not a socket; remove it", .0.display())]
    NoSocket(PathBuf),
    /// Another process listens on the socket.
    #[error("{} is already served by another process; stop it first", .0.display())]
    Served(PathBuf),
    /// Another process is starting to listen, or hangs while starting.
    #[error("another process is starting to listen in {} and does not finish; stop it first", .0.display())]
    Starting(PathBuf),
    /// The path of the directory leads to another kind of file. Links are not followed, because restricting the target
    /// would close it to other users.
    #[error("{} is not a directory but a file or a symbolic link; remove it", .0.display())]
    NoDirectory(PathBuf),
    /// The directory belongs to another user, who could replace the socket.
    #[error("directory {} belongs to uid {owner}, not to this process; remove it or choose another run_dir", .path.display())]
    Foreign { path: PathBuf, owner: u32 },
    /// Other users may write to the directory, which holds more than the socket, so restricting access would lock these
    /// users out.
    #[error("others may write to directory {} (mode {mode:o}), which holds more than the socket; choose one of its own", .path.display())]
    Writable { path: PathBuf, mode: u32 },
    /// The directory cannot be created or restricted.
    #[error("cannot prepare directory {}", .path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The kernel refuses to bind the socket.
    #[error("cannot listen on {}", .path.display())]
    Listen { path: PathBuf, source: io::Error },
}

/// Binds a stream socket that only this user may open.
///
/// # Errors
///
/// See [`BindError`] for the reasons.
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

/// A lock on the directory of a socket, for which other processes wait before binding there.
#[derive(Debug)]
#[must_use = "another start could take the way as soon as this is dropped: listen first"]
pub struct SocketLock(Flock<fs::File>);

/// The longest time to wait for another process that is binding its socket.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Creates a missing directory with mode 0700 (a shared directory such as `/run` stays unchanged) and removes a stale
/// socket. Keep the [`SocketLock`] until the socket is bound: a concurrent start must find the socket, not remove it.
///
/// # Errors
///
/// See [`BindError`] for the reasons.
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

/// Makes this process the service's only instance while the lock lives. Waits for an instance that is about to end,
/// because the writes of two instances must not interleave.
///
/// # Errors
///
/// Fails if another process holds the lock, or if the lock file cannot be created.
pub(crate) fn lock_instance(directory: &Path) -> Result<SocketLock, BindError> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let path = directory.join("lock");
    loop {
        let served = || BindError::Served(directory.to_owned());
        let lock = lock_within_timeout(options.open(&path), directory, served)?;
        // The previous instance may have emptied the directory, so that the next start would lock another file.
        if lock.is_at(&path) {
            return Ok(lock);
        }
    }
}

impl SocketLock {
    /// Returns whether the path still leads to the locked file.
    fn is_at(&self, path: &Path) -> bool {
        let found = fs::metadata(path).and_then(|there| Ok((there, self.0.metadata()?)));
        found
            .is_ok_and(|(there, locked)| (there.dev(), there.ino()) == (locked.dev(), locked.ino()))
    }
}

/// Empties a directory, but keeps the directory itself, which may be a mount point.
///
/// # Errors
///
/// Fails if an entry cannot be removed.
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

/// Removes the socket, unless another process serves it.
///
/// # Errors
///
/// See [`BindError`] for the reasons.
pub fn remove_socket(path: &Path, kind: SockType) -> Result<(), BindError> {
    match remove_stale(path, kind) {
        Err(BindError::Served(_)) => Ok(()),
        other => other,
    }
}

/// Locks a file, with a timeout; the kernel releases the lock when the process ends.
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

/// Removes a socket on which no process listens.
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

/// Creates or restricts a directory, so that only this user may enter.
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

/// Restricts a directory that holds only the socket, such as a directory that the kubelet created for a `hostPath` of
/// type `DirectoryOrCreate` (0755). Any other directory, such as `/run`, is shared and stays unchanged: other users see
/// the socket but can neither open nor replace it. Both are logged.
///
/// # Errors
///
/// Fails if other users could replace the socket, or if the directory cannot be restricted.
pub fn restrict_directory(socket: &Path) -> Result<(), BindError> {
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
        return Ok(());
    }
    for entry in fs::read_dir(parent).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        if Some(name.as_os_str()) != socket.file_name() {
            return check_shared(parent, mode);
        }
    }
    create_private_directory(parent)?;
    let (directory, mode) = (parent.display(), format_args!("{mode:o}"));
    tracing::warn!(%directory, %mode, "Restricted the directory of a socket to its owner");
    Ok(())
}

fn check_shared(directory: &Path, mode: u32) -> Result<(), BindError> {
    if mode & 0o022 != 0 {
        return Err(BindError::Writable {
            path: directory.to_owned(),
            mode,
        });
    }
    let (directory, mode) = (directory.display(), format_args!("{mode:o}"));
    tracing::warn!(
        %directory, %mode,
        "The directory of a socket is accessible to others and holds other files; use a directory of its own"
    );
    Ok(())
}

pub fn restrict_socket(path: &Path) -> Result<(), BindError> {
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(listen)
}

/// Connects, because there is no other way to find out; the listening process sees a peer that disconnects at once.
fn is_served(path: &Path, kind: SockType) -> io::Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, kind, flags, None)?;
    use std::os::fd::AsRawFd as _;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) | Err(nix::Error::EAGAIN) => Ok(true),
        // A listening socket of another type is in use, too.
        Err(nix::Error::EPROTOTYPE) => Ok(true),
        Err(nix::Error::ECONNREFUSED | nix::Error::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
