use std::{
    io,
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Relative, or contains `.` or `..`.
    #[error("{} is not a plain absolute path", .0.display())]
    NotPlain(PathBuf),
    /// Not below a permitted directory.
    #[error("{} is not below {}", .path.display(), roots_text(.roots))]
    OutsideRoots {
        path: PathBuf,
        /// The directories that are permitted.
        roots: Vec<PathBuf>,
    },
    /// The last component is a symlink other than procfs's `ns/net`, or an earlier one a magic link of procfs.
    #[error("{} goes through a symbolic link that is not followed", .0.display())]
    Symlink(PathBuf),
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// A file, directory, FIFO, device or socket.
    #[error("{} is not a namespace", .0.display())]
    NotANamespace(PathBuf),
    /// A namespace of another type.
    #[error("{} is a namespace, but not of type net", .0.display())]
    NotNet(PathBuf),
    /// Cannot be inspected or opened.
    #[error("cannot open {}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The namespace cannot be entered.
    #[error("cannot verify {}", .path.display())]
    Enter { path: PathBuf, source: EnterError },
    /// The kernel reports no cookie.
    #[error("cannot read the cookie of the network namespace (SO_NETNS_COOKIE, Linux 5.14)")]
    Cookie(#[source] io::Error),
}

impl OpenError {
    /// Converts setns's EINVAL with CLONE_NEWNET: another type (setns(2)).
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
    /// Cannot be opened, so the thread could not return.
    #[error("cannot open the thread's own network namespace")]
    Home(#[source] io::Error),
    /// The kernel rejects the call.
    #[error("cannot enter the network namespace (needs CAP_SYS_ADMIN)")]
    Setns(#[source] nix::Error),
}

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// No thread could be started for it.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The kernel rejects the call.
    #[error("cannot create a network namespace (needs CAP_SYS_ADMIN)")]
    Unshare(#[source] nix::Error),
    /// The new one could not be opened.
    #[error("cannot open the new network namespace")]
    Verify(#[source] OpenError),
    /// A bug: the thread panicked.
    #[error("the thread that creates a network namespace panicked")]
    Panicked,
}
