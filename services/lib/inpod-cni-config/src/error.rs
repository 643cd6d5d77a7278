use std::{io, path::PathBuf};

/// Why a text is no network configuration that a runtime takes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It is no JSON.
    #[error("it is no JSON: line {line}: {problem}")]
    Json {
        /// Counted from 1.
        line: usize,
        /// What was found.
        problem: &'static str,
    },
    /// It begins with a byte order mark, which the runtimes' JSON parser refuses (Go, encoding/json).
    #[error("it begins with a byte order mark, which runtimes refuse; save it without")]
    ByteOrderMark,
    /// It is something else than an object.
    #[error("it is no JSON object")]
    NoObject,
    /// A key that is needed is not there.
    #[error("it has no `{0}`")]
    Missing(&'static str),
    /// A key holds what it may not.
    #[error("`{key}` is not {expected}")]
    Wrong {
        /// The key.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A member of `plugins` is none.
    #[error("plugin {index} of the list {problem}")]
    Plugin {
        /// Counted from 0.
        index: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// A list where a single configuration belongs: a runtime reads `.conf` and `.json` as one plugin.
    #[error("it has no `type`; a list of plugins belongs into a file that ends in .conflist")]
    ListInConf,
    /// More than a runtime reads.
    #[error("it has {0} bytes; runtimes read at most 2 MiB")]
    TooLarge(u64),
}

/// Why a directory or file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", .path.display())]
pub struct ReadError {
    /// What was to be read.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

impl ReadError {
    pub(crate) fn of(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, source }
    }
}
