//! A node's CNI configuration: its directories, the file that the runtime uses, and byte-preserving edits.
//!
//! [`Conflist`] and [`Conf`] are texts with positions. [`Directory`] reads files like runtimes, and [`find_dirs`]
//! finds the runtime's directories. The crate never writes files.

mod cni_dirs;
mod conf;
mod conflist;
mod directory;
mod error;
mod json;
mod platforms;
mod runtimes;

pub use cni_dirs::{CniDirs, Origin, find_dirs};
pub use conf::Conf;
pub use conflist::{Conflist, Entry, Plugin, edit::json_eq};
pub use directory::{Directory, Loaded, NetworkFile, is_loaded};
pub use error::{Malformed, ReadError};
pub use platforms::{PLATFORMS, Platform};
pub use runtimes::{RuntimeConfig, containerd, crio};

/// The executable of inpod, its `type` in a conflist.
pub const INPOD_CNI: &str = "inpod-cni";

/// Istio's `type`, which inpod replaces.
pub const ISTIO_CNI: &str = "istio-cni";
