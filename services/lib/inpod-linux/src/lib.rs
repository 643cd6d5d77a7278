//! Opens network namespaces, verifies their identity, and runs code in them.
//!
//! [`Netns::within`] is the only way to enter one, and always returns. The crate is synchronous, because code in
//! another netns must not change threads, and knows nothing of pods or claims.

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

/// An open, verified network namespace. While it is open, the kernel does not reuse its inode, and its network (with
/// the host side of its veth) stays alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    path: PathBuf,
}

impl Netns {
    /// Opens and verifies a path below one of the roots.
    ///
    /// The path is resolved once. Opening something else, such as a FIFO or a device, neither blocks nor affects it.
    ///
    /// # Errors
    ///
    /// See [`OpenError`] for the reasons.
    pub fn open(path: &Path, roots: &[PathBuf]) -> Result<Self, OpenError> {
        Ok(Self::open_with(path, roots, || ())?.0)
    }

    /// Opens it like [`Self::open`], and runs `f` in it, like [`Self::within`], in the same visit as the verification.
    ///
    /// # Errors
    ///
    /// See [`OpenError`] for the reasons.
    pub fn open_with<T>(
        path: &Path,
        roots: &[PathBuf],
        f: impl FnOnce() -> T,
    ) -> Result<(Self, T), OpenError> {
        let fd = open::open(path, roots)?;
        Self::verify(fd, path, f)
    }

    /// Opens the calling thread's netns.
    ///
    /// # Errors
    ///
    /// If procfs is not mounted or not readable.
    pub fn current() -> Result<Self, OpenError> {
        let path = Path::new(enter::CURRENT);
        let fd = fs::File::open(path).map_err(|source| OpenError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::verify(fd.into(), path, || ())?.0)
    }

    /// Creates one with only `lo`, which is down. It lives as long as the value; its path does not exist.
    ///
    /// # Errors
    ///
    /// If the kernel rejects it, as without CAP_SYS_ADMIN.
    pub fn create() -> Result<Self, CreateError> {
        let made = std::thread::Builder::new().spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(CreateError::Unshare)?;
            Self::current().map_err(CreateError::Verify)
        });
        // The thread ends, but the open descriptor keeps its netns alive.
        made.map_err(CreateError::Thread)?
            .join()
            .unwrap_or(Err(CreateError::Panicked))
    }

    /// Verifies the identity: device and inode identify the open namespace, the cookie distinguishes it from a later
    /// one with the same inode, and entering proves that its type is net.
    fn verify<T>(fd: OwnedFd, path: &Path, f: impl FnOnce() -> T) -> Result<(Self, T), OpenError> {
        let found = nix::sys::stat::fstat(&fd).map_err(|errno| OpenError::Io {
            path: path.to_owned(),
            source: errno.into(),
        })?;
        let visit = || Ok((cookie::current()?, f()));
        let (cookie, result) = enter::within(fd.as_fd(), visit)
            .map_err(|error| OpenError::of_entering(error, path))?
            .map_err(OpenError::Cookie)?;
        let id = NetnsId {
            device: found.st_dev,
            inode: found.st_ino,
            cookie,
        };
        let netns = Self {
            fd,
            id,
            path: path.to_owned(),
        };
        Ok((netns, result))
    }

    pub fn id(&self) -> NetnsId {
        self.id
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether both are the same.
    pub fn same_as(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Returns whether its path still leads to it.
    pub fn path_intact(&self) -> bool {
        self.is_at(&self.path).unwrap_or(false)
    }

    /// Follows links, such as `/proc/<pid>/ns/net`.
    ///
    /// # Errors
    ///
    /// If the path cannot be inspected.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let found = fs::metadata(path)?;
        Ok((found.dev(), found.ino()) == (self.id.device, self.id.inode))
    }

    /// Runs `f` in this netns on the calling thread and returns to its own, also after a panic. What `f` opens (a
    /// socket, a file below `/proc/thread-self/net`) keeps belonging to this netns. Threads and processes that `f`
    /// starts stay in it: start no threads, and only processes meant to be there.
    ///
    /// If the thread cannot return, the process aborts: in another netns it would act on the wrong pod.
    ///
    /// # Errors
    ///
    /// If the netns cannot be entered; then `f` has not run.
    pub fn within<T>(&self, f: impl FnOnce() -> T) -> Result<T, EnterError> {
        enter::within(self.fd.as_fd(), f)
    }

    /// Returns how often this process has entered a netns so far.
    pub fn visits() -> u64 {
        enter::visits()
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
