use std::{io, path::PathBuf};

/// Reasons for which runtimes reject a network configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("invalid JSON: {0}")]
    Json(String),
    /// Go's encoding/json rejects a byte order mark.
    #[error("it begins with a byte order mark, which runtimes reject; save it without one")]
    ByteOrderMark,
    #[error("it has no `{0}`")]
    Missing(&'static str),
    #[error("`{key}` is not {expected}")]
    Wrong {
        key: &'static str,
        expected: &'static str,
    },
    /// Only libcni from 1.3 on loads such a list.
    #[error(
        "it has no `plugins`: list its plugins there, because inpod cannot stand behind drop-in plugins"
    )]
    NoPlugins,
    #[error("plugin {index} of the list {problem}")]
    Plugin { index: usize, problem: String },
    /// Runtimes parse `.conf` and `.json` files as single plugins, never as lists.
    #[error("it has no `type`; a list of plugins needs a file name that ends in .conflist")]
    ListInConf,
    #[error("it is larger than 2 MiB, which runtimes refuse to read")]
    TooLarge,
    #[error("it is a symbolic link to {}, which does not exist or is not mounted into the container", .0.display())]
    Dangling(PathBuf),
    #[error("it is no regular file")]
    NoFile,
    #[error("its name is not UTF-8: rename it")]
    Name,
    #[error("it cannot be read: {0}")]
    Unreadable(String),
}

#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", .path.display())]
pub struct ReadError {
    pub path: PathBuf,
    pub source: io::Error,
}

impl ReadError {
    pub(crate) fn of(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, source }
    }
}
