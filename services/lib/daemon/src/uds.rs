//! Unix sockets: a directory of their own, no stale one in the way, no live one taken over, nobody else's to open.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
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
    prepare(path, SockType::Stream)?;
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    let listener = UnixListener::bind(path).map_err(listen)?;
    restrict(path)?;
    Ok(listener)
}

/// Makes the way free for a socket: its directory is there (0700 if it had to be made; one that is shared with others,
/// like `/run`, is left as it is), and what a dead process left is gone.
///
/// # Errors
///
/// See [`BindError`].
pub fn prepare(path: &Path, kind: SockType) -> Result<(), BindError> {
    if path.as_os_str().len() > 107 {
        return Err(BindError::TooLong(path.to_owned()));
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        directory(parent)?;
    }
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
pub fn directory(path: &Path) -> Result<(), BindError> {
    let error = |source| BindError::Directory {
        path: path.to_owned(),
        source,
    };
    let mut builder = fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(error)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(error)
}

/// Lets only this user open a socket.
///
/// # Errors
///
/// When the mode cannot be set.
pub fn restrict(path: &Path) -> Result<(), BindError> {
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
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_socket_is_0600_in_a_directory_of_0700() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netconfig/grpc.sock");
        let _listener = bind(&path).unwrap();
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_served_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(BindError::Served(_))));
        drop(first);
        bind(&path).unwrap();
    }

    #[tokio::test]
    async fn a_file_in_the_way_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "precious").unwrap();
        assert!(bind(&path).unwrap_err().to_string().contains("no socket"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_path_over_107_bytes_is_refused_with_its_length() {
        let error = bind(&Path::new("/tmp").join("x".repeat(200)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("205 bytes"), "{error}");
    }
}
