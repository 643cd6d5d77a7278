//! Opens a network namespace, proves that it is one, and runs code in it.
//!
//! [`Netns`] is a held, proven netns. There is one way in, [`Netns::within`], and no way to stay. This crate knows
//! nothing of pods or claims, and is synchronous: what runs in a foreign netns must not be moved to another thread.

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

/// A network namespace that is held open. While it is held, its inode number cannot be given to another one, and its
/// network, the host side of its veth included, stays alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    path: PathBuf,
}

impl Netns {
    /// Opens the netns at a path below one of the roots and proves that it is one.
    ///
    /// The path is resolved once. Whatever else stands there, a FIFO or a device, is neither waited for nor touched.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(path: &Path, roots: &[PathBuf]) -> Result<Self, OpenError> {
        let fd = open::open(path, roots)?;
        Self::prove(fd, path)
    }

    /// The netns of the calling thread.
    ///
    /// # Errors
    ///
    /// When procfs is not mounted or not readable.
    pub fn current() -> Result<Self, OpenError> {
        let path = Path::new(enter::CURRENT);
        let fd = fs::File::open(path).map_err(|source| OpenError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::prove(fd.into(), path)
    }

    /// Makes a new one, with nothing in it but `lo`, which is down. It lives as long as it is held; its path leads
    /// nowhere.
    ///
    /// # Errors
    ///
    /// When the kernel refuses; CAP_SYS_ADMIN is needed.
    pub fn create() -> Result<Self, CreateError> {
        let made = std::thread::Builder::new().spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(CreateError::Unshare)?;
            Self::current().map_err(CreateError::Prove)
        });
        // The thread ends in the new netns, and what it opened is what keeps that alive.
        made.map_err(CreateError::Thread)?
            .join()
            .unwrap_or(Err(CreateError::Panicked))
    }

    /// Device and inode tell which namespace it is while it is held. Only the cookie tells it from a later one that
    /// got the same inode, and only by entering is it sure to be of type net.
    fn prove(fd: OwnedFd, path: &Path) -> Result<Self, OpenError> {
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

    /// Which netns it is.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this is the same namespace.
    pub fn same_as(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Whether the path that it was opened at still leads to it.
    pub fn path_intact(&self) -> bool {
        self.is_at(&self.path).unwrap_or(false)
    }

    /// Whether a path leads to it. Follows links: `/proc/<pid>/ns/net` is one.
    ///
    /// # Errors
    ///
    /// When the path cannot be looked at.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let found = fs::metadata(path)?;
        Ok((found.dev(), found.ino()) == (self.id.device, self.id.inode))
    }

    /// Runs `f` in this netns, on the calling thread, and comes back, also from a panic. What `f` opens (a socket, a
    /// file below `/proc/thread-self/net`) belongs to this netns for good; what it starts (a thread, a process)
    /// stays in it: no thread, and no process but one that is meant to be there.
    ///
    /// When there is no way back the process is aborted: a thread that goes on in a foreign netns would act on the
    /// wrong pod.
    ///
    /// # Errors
    ///
    /// When the netns cannot be entered; `f` has not run then.
    pub fn within<T>(&self, f: impl FnOnce() -> T) -> Result<T, EnterError> {
        enter::within(self.fd.as_fd(), f)
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
