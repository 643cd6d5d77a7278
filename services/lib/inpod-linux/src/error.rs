use std::{
    io,
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path is relative, or contains `.` or `..`.
    #[error("{} is not a plain absolute path", .0.display())]
    NotPlain(PathBuf),
    /// The path is not below any permitted directory.
    #[error("{} is not below {}", .path.display(), roots_text(.roots))]
    OutsideRoots {
        path: PathBuf,
        /// The permitted directories, for the message.
        roots: Vec<PathBuf>,
    },
    /// The last component is a symlink other than procfs's `ns/net`, or an earlier component is a magic link of procfs.
    #[error("{} goes through a symbolic link that is not followed", .0.display())]
    Symlink(PathBuf),
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// The path leads to a file, directory, FIFO, device or socket.
    #[error("{} is not a namespace", .0.display())]
    NotANamespace(PathBuf),
    /// The path leads to a namespace of another type.
    #[error("{} is a namespace, but not of type net", .0.display())]
    NotNet(PathBuf),
    /// The path cannot be inspected or opened.
    #[error("cannot open {}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The namespace cannot be entered for the verification.
    #[error("cannot verify {}", .path.display())]
    Enter { path: PathBuf, source: EnterError },
    /// The kernel reports no cookie for the namespace.
    #[error("cannot read the cookie of the network namespace (SO_NETNS_COOKIE, Linux 5.14)")]
    Cookie(#[source] io::Error),
}

impl OpenError {
    /// Converts an error of setns with CLONE_NEWNET, for which EINVAL means a namespace of another type (setns(2)).
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

#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The thread's own netns cannot be opened, so the thread could not return.
    #[error("cannot open the thread's own network namespace")]
    Home(#[source] io::Error),
    /// The kernel refuses to let the thread enter.
    #[error("cannot enter the network namespace (needs CAP_SYS_ADMIN)")]
    Setns(#[source] nix::Error),
}

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// No thread could be started to create the namespace.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The kernel refuses to create a namespace.
    #[error("cannot create a network namespace (needs CAP_SYS_ADMIN)")]
    Unshare(#[source] nix::Error),
    /// The new namespace could not be opened or verified.
    #[error("cannot open the new network namespace")]
    Verify(#[source] OpenError),
    /// The thread panicked, which is a bug.
    #[error("the thread that creates a network namespace panicked")]
    Panicked,
}
