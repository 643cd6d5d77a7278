//! A node's CNI configuration: the directories, the file that the runtime uses, and byte-preserving edits.
//!
//! [`Conflist`] and [`Conf`] are texts with positions. [`Directory`] reads files as runtimes do, and [`find_dirs`]
//! finds the directories of the runtime. The crate never writes files.

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

/// The name of inpod's executable, which is the `type` in a conflist.
pub const INPOD_CNI: &str = "inpod-cni";

/// The `type` of Istio's plugin, which inpod replaces.
pub const ISTIO_CNI: &str = "istio-cni";
