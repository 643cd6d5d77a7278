use std::{
    io,
    path::{Path, PathBuf},
};

/// The reason why a network namespace could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path is relative, or contains `.` or `..`.
    #[error("{} is not a plain absolute path", .0.display())]
    NotPlain(PathBuf),
    /// The path is not below one of the permitted directories.
    #[error("{} is not below {}", .path.display(), roots_text(.roots))]
    OutsideRoots {
        path: PathBuf,
        /// The directories that are permitted.
        roots: Vec<PathBuf>,
    },
    /// The last component is a symbolic link other than procfs's `ns/net`, or an earlier one is a magic link of procfs.
    #[error("{} goes through a symbolic link that is not followed", .0.display())]
    Symlink(PathBuf),
    /// The path does not exist.
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// A file, directory, FIFO, device or socket.
    #[error("{} is not a namespace", .0.display())]
    NotANamespace(PathBuf),
    /// A namespace of another type.
    #[error("{} is a namespace, but not of type net", .0.display())]
    NotNet(PathBuf),
    /// The path cannot be inspected or opened.
    #[error("cannot open {}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The namespace cannot be entered.
    #[error("cannot verify {}", .path.display())]
    Enter { path: PathBuf, source: EnterError },
    /// The kernel does not report the cookie.
    #[error("cannot read the cookie of the network namespace (SO_NETNS_COOKIE, Linux 5.14)")]
    Cookie(#[source] io::Error),
}

impl OpenError {
    /// setns with CLONE_NEWNET fails with EINVAL if the descriptor is of another type (setns(2)).
    pub(crate) fn of_entering(error: EnterError, path: &Path) -> Self {
        let path = path.to_owned();
        match error {
            EnterError::Setns(nix::Error::EINVAL) => Self::NotNet(path),
            source @ (EnterError::Setns(_) | EnterError::Home(_)) => Self::Enter { path, source },
        }
    }
}

fn roots_text(roots: &[PathBuf]) -> String {
    let roots: Vec<_> = roots
        .iter()
        .map(|root| root.display().to_string())
        .collect();
    roots.join(", ")
}

/// The reason why a network namespace could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The thread's own network namespace cannot be opened, so it could not return.
    #[error("cannot open the thread's own network namespace")]
    Home(#[source] io::Error),
    /// The kernel rejects the call.
    #[error("cannot enter the network namespace (needs CAP_SYS_ADMIN)")]
    Setns(#[source] nix::Error),
}

/// The reason why a network namespace could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// No thread could be started to create it in.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The kernel rejects the call.
    #[error("cannot create a network namespace (needs CAP_SYS_ADMIN)")]
    Unshare(#[source] nix::Error),
    /// The new namespace could not be opened.
    #[error("cannot open the new network namespace")]
    Verify(#[source] OpenError),
    /// The thread panicked: a bug.
    #[error("the thread that creates a network namespace panicked")]
    Panicked,
}
