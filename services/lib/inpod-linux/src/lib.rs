//! Opens network namespaces, verifies their identity, and runs code in them.
//!
//! [`Netns`] is an open, verified network namespace. [`Netns::within`] is the only way to enter one, and always returns
//! from it. The crate is synchronous, because code in another network namespace must not move to another thread, and it
//! knows nothing of pods or claims.

mod cookie;
mod enter;
mod error;
mod open;
mod path;

pub use error::{CreateError, EnterError, OpenError};

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use inpod_types::NetnsId;
use nix::sched::CloneFlags;

/// An open network namespace. While it is open, the kernel does not reuse its inode number, and its network (including
/// the host side of its veth) stays alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    path: PathBuf,
}

impl Netns {
    /// Opens the network namespace at a path below one of the roots and verifies its identity.
    ///
    /// The path is resolved once. If it is something else, such as a FIFO or a device, opening neither blocks nor has
    /// an effect on it.
    ///
    /// # Errors
    ///
    /// The reasons are those of [`OpenError`].
    pub fn open(path: &Path, roots: &[PathBuf]) -> Result<Self, OpenError> {
        let fd = open::open(path, roots)?;
        Self::verify(fd, path)
    }

    /// Opens the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// Fails if procfs is not mounted or not readable.
    pub fn current() -> Result<Self, OpenError> {
        let path = Path::new(enter::CURRENT);
        let fd = fs::File::open(path).map_err(|source| OpenError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::verify(fd.into(), path)
    }

    /// Creates a network namespace that contains only `lo`, which is down. It lives as long as the value; its
    /// path does not exist.
    ///
    /// # Errors
    ///
    /// Fails if the kernel rejects the call, which needs CAP_SYS_ADMIN.
    pub fn create() -> Result<Self, CreateError> {
        let made = std::thread::Builder::new().spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(CreateError::Unshare)?;
            Self::current().map_err(CreateError::Verify)
        });
        // The thread ends in the new namespace, which its open descriptor keeps alive.
        made.map_err(CreateError::Thread)?
            .join()
            .unwrap_or(Err(CreateError::Panicked))
    }

    /// Device and inode identify the namespace while it is open. The cookie is needed to distinguish it from a later
    /// one with the same inode, and entering it to be sure that it is of type net.
    fn verify(fd: OwnedFd, path: &Path) -> Result<Self, OpenError> {
        let found = nix::sys::stat::fstat(&fd).map_err(|errno| OpenError::Io {
            path: path.to_owned(),
            source: errno.into(),
        })?;
        let cookie = enter::within(fd.as_fd(), cookie::current)
            .map_err(|error| OpenError::of_entering(error, path))?
            .map_err(OpenError::Cookie)?;
        let id = NetnsId {
            device: found.st_dev,
            inode: found.st_ino,
            cookie,
        };
        Ok(Self {
            fd,
            id,
            path: path.to_owned(),
        })
    }

    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Returns the path at which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether both are the same namespace.
    pub fn same_as(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Returns whether the path at which it was opened still leads to it.
    pub fn path_intact(&self) -> bool {
        self.is_at(&self.path).unwrap_or(false)
    }

    /// Returns whether a path leads to it. Follows links, such as `/proc/<pid>/ns/net`.
    ///
    /// # Errors
    ///
    /// Fails if the path cannot be inspected.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let found = fs::metadata(path)?;
        Ok((found.dev(), found.ino()) == (self.id.device, self.id.inode))
    }

    /// Runs `f` in this network namespace on the calling thread and returns to the thread's own, also after a panic.
    /// What `f` opens (a socket, a file below `/proc/thread-self/net`) keeps belonging to this namespace. Threads and
    /// processes that `f` starts stay in it: start no threads, and only processes that are meant to be there.
    ///
    /// If the thread cannot return, the process is aborted: a thread that continues in another namespace would act
    /// on the wrong pod.
    ///
    /// # Errors
    ///
    /// Fails if the namespace cannot be entered; `f` has not run then.
    pub fn within<T>(&self, f: impl FnOnce() -> T) -> Result<T, EnterError> {
        enter::within(self.fd.as_fd(), f)
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
