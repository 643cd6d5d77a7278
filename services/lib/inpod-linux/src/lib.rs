//! Opens network namespaces, verifies their identity, and runs code in them.
//!
//! [`Netns::within`] is the only way to enter a netns, and always returns. The crate is synchronous, because code in
//! another netns must not change threads. Pods and claims are unknown here.

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

/// An open, verified network namespace. While the namespace is open, the kernel does not reuse its inode, and its
/// network (with the host side of its veth) stays alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    path: PathBuf,
}

impl Netns {
    /// Opens and verifies the netns at a path below one of the roots.
    ///
    /// The path is resolved once. If the path leads to another file, such as a FIFO or a device, opening neither blocks
    /// nor affects the file.
    ///
    /// # Errors
    ///
    /// See [`OpenError`] for the reasons.
    pub fn open(path: &Path, roots: &[PathBuf]) -> Result<Self, OpenError> {
        Ok(Self::open_with(path, roots, || ())?.0)
    }

    /// Opens a netns as [`Self::open`] does. During the visit for the verification, `f` runs in the netns, as in
    /// [`Self::within`].
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

    /// Opens the netns of the calling thread.
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
        Ok(Self::verify(fd.into(), path, || ())?.0)
    }

    /// Creates a netns with only the interface `lo`, which is down. The netns lives as long as the returned value, and
    /// its path does not exist.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses, for example without CAP_SYS_ADMIN.
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

    /// Verifies the identity. Device and inode identify the open namespace, the cookie distinguishes the namespace from
    /// a later one with the same inode, and entering proves that the type is net.
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

    /// Returns whether both values refer to the same netns.
    pub fn same_as(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Returns whether the path of this netns still leads to the same netns.
    pub fn path_intact(&self) -> bool {
        self.is_at(&self.path).unwrap_or(false)
    }

    /// Returns whether a path leads to this netns; links such as `/proc/<pid>/ns/net` are followed.
    ///
    /// # Errors
    ///
    /// Fails if the path cannot be inspected.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let found = fs::metadata(path)?;
        Ok((found.dev(), found.ino()) == (self.id.device, self.id.inode))
    }

    /// Runs `f` in this netns on the calling thread, which then returns to its own netns, even after a panic. A file
    /// opened by `f` (a socket, a file below `/proc/thread-self/net`) still belongs to this netns afterwards. Threads
    /// and processes started by `f` stay in the netns, so start no threads, and only processes meant to run there.
    ///
    /// If the thread cannot return, the process aborts, because in another netns the thread would act on the wrong pod.
    ///
    /// # Errors
    ///
    /// Fails if the netns cannot be entered, in which case `f` has not run.
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
