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

/// Reasons why a socket cannot be bound, or why a service cannot have its directory.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process listens on the socket, or holds the directory's lock.
    #[error("{} is already served by another process; stop it first", .0.display())]
    Served(PathBuf),
    /// The path or its directory is unsuitable, as the text explains together with the remedy.
    #[error("{0}")]
    Unsuitable(String),
    #[error("cannot {action} {}", .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

fn cannot_listen<E: Into<io::Error>>(path: &Path) -> impl Fn(E) -> BindError + Copy {
    cannot("listen on", path)
}

fn cannot_prepare<E: Into<io::Error>>(directory: &Path) -> impl Fn(E) -> BindError + Copy {
    cannot("prepare directory", directory)
}

fn cannot<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl Fn(E) -> BindError + Copy {
    move |source| BindError::Io {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

/// Binds a stream socket that only this user may open.
///
/// # Errors
///
/// See [`BindError`] for the reasons.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let lock = prepare(path, SockType::Stream)?;
    let listener = UnixListener::bind(path).map_err(cannot_listen(path))?;
    drop(lock);
    restrict_socket(path)?;
    Ok(listener)
}

/// A lock on the directory of a socket, for which other processes wait before binding there.
pub type SocketLock = Flock<fs::File>;

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
        let (shown, length) = (path.display(), path.as_os_str().len());
        return Err(BindError::Unsuitable(format!(
            "socket path {shown} has {length} bytes, more than 107; choose a shorter run_dir"
        )));
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
    let starting = format!(
        "another process is starting to listen in {} and does not finish; stop it first",
        directory.display()
    );
    let file = fs::File::open(directory);
    lock(file, directory, BindError::Unsuitable(starting))
}

fn lock(
    file: io::Result<fs::File>,
    directory: &Path,
    late: BindError,
) -> Result<SocketLock, BindError> {
    let file = file.map_err(cannot_prepare(directory))?;
    match lock_within_timeout(file) {
        Err(nix::Error::EWOULDBLOCK) => Err(late),
        result => result.map_err(cannot_prepare(directory)),
    }
}

/// Makes this process the service's only instance while the lock lives. Waits for an instance that is about to end,
/// because the writes of two instances must not interleave.
///
/// # Errors
///
/// Fails if another process holds the lock, or if the lock file cannot be created.
pub(crate) fn lock_instance(directory: &Path) -> Result<SocketLock, BindError> {
    let path = directory.join("lock");
    loop {
        let served = BindError::Served(directory.to_owned());
        let lock = lock(open_lock(&path), directory, served)?;
        // The previous instance may have emptied the directory, so that the next start would lock another file.
        if leads_to(&path, &lock) {
            return Ok(lock);
        }
    }
}

/// Opens a file for [`lock_within_timeout`], and creates a missing one.
pub fn open_lock(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.open(path)
}

/// Locks a file; the kernel releases the lock when the process ends.
///
/// # Errors
///
/// Fails with EWOULDBLOCK if another process holds the lock for 2 s.
pub fn lock_within_timeout(mut file: fs::File) -> nix::Result<Flock<fs::File>> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((same, nix::Error::EWOULDBLOCK)) if Instant::now() < deadline => file = same,
            Err((_, error)) => return Err(error),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether the path still leads to the file.
fn leads_to(path: &Path, file: &fs::File) -> bool {
    let found = fs::metadata(path).and_then(|there| Ok((there, file.metadata()?)));
    found.is_ok_and(|(there, file)| (there.dev(), there.ino()) == (file.dev(), file.ino()))
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

/// Removes a socket on which no process listens.
fn remove_stale(path: &Path, kind: SockType) -> Result<(), BindError> {
    let Ok(found) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !found.file_type().is_socket() {
        let shown = path.display();
        return Err(BindError::Unsuitable(format!(
            "{shown} is in the way: it is not a socket; remove it"
        )));
    }
    if is_served(path, kind).map_err(cannot_listen(path))? {
        return Err(BindError::Served(path.to_owned()));
    }
    fs::remove_file(path).map_err(cannot_listen(path))
}

/// Creates or restricts a directory, so that only this user may enter. Links are not followed, because restricting the
/// target would close it to other users.
pub(crate) fn create_private_directory(path: &Path) -> Result<(), BindError> {
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    let found = match (fs::symlink_metadata(path), made) {
        (Ok(found), _) => found,
        (Err(_), Err(cause)) | (Err(cause), Ok(())) => return Err(cannot_prepare(path)(cause)),
    };
    if !found.is_dir() {
        let shown = path.display();
        return Err(BindError::Unsuitable(format!(
            "{shown} is not a directory but a file or a symbolic link; remove it"
        )));
    }
    check_owner(path, &found)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(cannot_prepare(path))
}

/// Rejects a directory of another user, who could replace the socket.
fn check_owner(directory: &Path, found: &fs::Metadata) -> Result<(), BindError> {
    if found.uid() == nix::unistd::geteuid().as_raw() {
        return Ok(());
    }
    let (shown, owner) = (directory.display(), found.uid());
    Err(BindError::Unsuitable(format!(
        "directory {shown} belongs to uid {owner}, not to this process; remove it or choose another run_dir"
    )))
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
    let error = cannot_prepare(parent);
    let found = fs::metadata(parent).map_err(error)?;
    check_owner(parent, &found)?;
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

/// Rejects a shared directory to which others may write. To restrict it would lock its other users out.
fn check_shared(directory: &Path, mode: u32) -> Result<(), BindError> {
    let (directory, mode_text) = (directory.display(), format_args!("{mode:o}"));
    if mode & 0o022 != 0 {
        return Err(BindError::Unsuitable(format!(
            "others may write to directory {directory} (mode {mode_text}), which holds more than the socket; \
             choose one of its own"
        )));
    }
    tracing::warn!(
        %directory, mode = %mode_text,
        "The directory of a socket is accessible to others and holds other files; use a directory of its own"
    );
    Ok(())
}

pub fn restrict_socket(path: &Path) -> Result<(), BindError> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(cannot_listen(path))
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
