use std::{
    io,
    path::{Path, PathBuf},
};

/// Why a netns could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path is relative, or has `.` or `..` in it.
    #[error("{} is no plain absolute path", .0.display())]
    NotPlain(PathBuf),
    /// The path leads elsewhere.
    #[error("{} is not below {}", .path.display(), roots_text(.roots))]
    OutsideRoots {
        /// The path.
        path: PathBuf,
        /// The directories that are allowed.
        roots: Vec<PathBuf>,
    },
    /// The last component is a symbolic link other than procfs's `ns/net`, or one before it jumps between processes.
    #[error("{} goes through a link that is not followed", .0.display())]
    Symlink(PathBuf),
    /// There is nothing.
    #[error("there is nothing at {}", .0.display())]
    Missing(PathBuf),
    /// A file, directory, FIFO, device or socket.
    #[error("{} is no namespace", .0.display())]
    NotANamespace(PathBuf),
    /// A namespace of another type.
    #[error("{} is a namespace, but not of type net", .0.display())]
    NotNet(PathBuf),
    /// It could not be looked at or opened.
    #[error("cannot open {}", .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It could not be entered.
    #[error("cannot prove {}", .path.display())]
    Enter {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: EnterError,
    },
    /// The kernel did not tell the cookie.
    #[error("cannot read the cookie of the netns (SO_NETNS_COOKIE, Linux 5.14)")]
    Cookie(#[source] io::Error),
}

impl OpenError {
    /// EINVAL of setns with CLONE_NEWNET says that the descriptor is of another type (setns(2)).
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

/// Why a netns could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The way back could not be secured.
    #[error("cannot hold the thread's own netns")]
    Home(#[source] io::Error),
    /// The kernel refused.
    #[error("cannot enter the netns (CAP_SYS_ADMIN is needed)")]
    Setns(#[source] nix::Error),
}

/// Why a netns could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// There is no thread to make it in.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The kernel refused.
    #[error("cannot make a netns (CAP_SYS_ADMIN is needed)")]
    Unshare(#[source] nix::Error),
    /// What was made could not be held.
    #[error("cannot hold the netns that was made")]
    Prove(#[source] OpenError),
    /// A defect.
    #[error("the thread that makes a netns panicked")]
    Panicked,
}
