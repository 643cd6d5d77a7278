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
    let way = prepare(path, SockType::Stream)?;
    let listen = |source| BindError::Listen {
        path: path.to_owned(),
        source,
    };
    let listener = UnixListener::bind(path).map_err(listen)?;
    drop(way);
    restrict(path)?;
    Ok(listener)
}

/// The way to a socket is free, and nobody else may take it: for as long as this lives other starts wait.
#[derive(Debug)]
#[must_use = "another start could take the way as soon as this is dropped: listen first"]
pub struct Way(#[expect(dead_code, reason = "held, not read")] Flock<fs::File>);

/// How long another start may take.
const START: Duration = Duration::from_secs(2);

/// Makes the way free for a socket: its directory is there (0700 if it had to be made; one that is shared with others,
/// like `/run`, is left as it is), and what a dead process left is gone. Of two starts at once the second finds the
/// first one's socket: it waits for the [`Way`], which is to be held until the socket is listened on.
///
/// # Errors
///
/// See [`BindError`].
pub fn prepare(path: &Path, kind: SockType) -> Result<Way, BindError> {
    if path.as_os_str().len() > 107 {
        return Err(BindError::TooLong(path.to_owned()));
    }
    let parent = path.parent().unwrap_or_else(|| Path::new("/"));
    if !parent.exists() {
        directory(parent)?;
    }
    let way = lock(parent)?;
    clear(path, kind)?;
    Ok(way)
}

fn lock(directory: &Path) -> Result<Way, BindError> {
    let file = fs::File::open(directory);
    let starting = || BindError::Starting(directory.to_owned());
    wait_for(file, directory, starting)
}

/// Makes this process the only one of its kind: it holds the directory for as long as the value lives. One that is
/// about to end is waited for, so that its last effects do not mix with the first ones of its successor.
///
/// # Errors
///
/// When another process has it, or it cannot be had.
pub(crate) fn alone(directory: &Path) -> Result<Way, BindError> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let served = || BindError::Served(directory.to_owned());
    wait_for(options.open(directory.join("lock")), directory, served)
}

/// Locks a file that belongs to a directory; the kernel lets go of it with the process.
fn wait_for(
    file: io::Result<fs::File>,
    directory: &Path,
    late: impl FnOnce() -> BindError,
) -> Result<Way, BindError> {
    let error = |source: io::Error| BindError::Directory {
        path: directory.to_owned(),
        source,
    };
    let mut file = file.map_err(error)?;
    let deadline = Instant::now() + START;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Way(lock)),
            Err((_, nix::Error::EWOULDBLOCK)) if Instant::now() >= deadline => return Err(late()),
            Err((same, nix::Error::EWOULDBLOCK)) => file = same,
            Err((_, cause)) => return Err(error(cause.into())),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Removes what a dead process left at the path of a socket.
fn clear(path: &Path, kind: SockType) -> Result<(), BindError> {
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

    fn refused(path: &Path) -> String {
        format!("{:#}", anyhow::Error::from(bind(path).unwrap_err()))
    }

    #[tokio::test]
    async fn a_file_a_directory_or_a_link_in_the_way_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (file, subdir, link) = (
            dir.path().join("f"),
            dir.path().join("d"),
            dir.path().join("l"),
        );
        fs::write(&file, "precious").unwrap();
        fs::create_dir(&subdir).unwrap();
        std::os::unix::fs::symlink("/nowhere", &link).unwrap();
        for path in [&file, &subdir, &link] {
            let error = refused(path);
            let named = error.contains(path.to_str().unwrap()) && error.contains("no socket");
            assert!(named, "{error}");
            assert!(
                fs::symlink_metadata(path).is_ok(),
                "{} is kept",
                path.display()
            );
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_run_dir_that_is_a_file_or_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("inpod");
        fs::write(&file, "").unwrap();
        let error = format!(
            "{:#}",
            anyhow::Error::from(directory(&file.join("netconfig")).unwrap_err())
        );
        assert!(
            error.contains("inpod/netconfig") && error.contains("Not a directory"),
            "{error}"
        );
        let error = directory(&file).unwrap_err().to_string();
        assert!(error.contains("no directory"), "{error}");
        // Nobody can make one there, root included.
        let error = directory(Path::new("/proc/inpod/netconfig"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/proc/inpod/netconfig"), "{error}");
    }

    #[tokio::test]
    async fn a_link_above_is_followed_and_one_in_place_of_the_directory_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("run"));
        fs::create_dir(&real).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        // As /var/run leads to /run.
        directory(&link.join("inpod")).unwrap();
        assert!(real.join("inpod").is_dir());
        let error = directory(&link).unwrap_err();
        assert!(matches!(error, BindError::NoDirectory(_)), "{error}");
        assert_eq!(mode(&real), 0o755, "what the link leads to is as it was");
    }

    #[tokio::test]
    async fn of_many_starts_at_once_over_a_stale_socket_one_serves() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        for _ in 0..25 {
            drop(bind(&path).unwrap());
            let starts = (0..8).map(|_| {
                let path = path.clone();
                tokio::task::spawn_blocking(move || bind(&path))
            });
            let results = futures_util::future::join_all(starts.collect::<Vec<_>>()).await;
            let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
            let winners = results.iter().filter(|result| result.is_ok()).count();
            assert_eq!(winners, 1, "{results:?}");
            let losers = results.iter().filter_map(|result| result.as_ref().err());
            assert!(
                losers
                    .into_iter()
                    .all(|error| matches!(error, BindError::Served(_)))
            );
            assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        }
    }

    #[test]
    fn a_directory_has_one_process_and_is_free_with_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let first = alone(dir.path()).unwrap();
        let began = Instant::now();
        let error = alone(dir.path()).unwrap_err();
        assert!(matches!(error, BindError::Served(_)), "{error}");
        assert!(began.elapsed() >= START, "one that is ending is waited for");
        drop(first);
        drop(alone(dir.path()).unwrap());
    }

    #[tokio::test]
    async fn a_path_over_107_bytes_is_refused_with_its_length() {
        let error = bind(&Path::new("/tmp").join("x".repeat(200)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("205 bytes"), "{error}");
    }
}
