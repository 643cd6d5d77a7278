//! The CNI configuration of a node: its directories, the file that the runtime uses, and byte-preserving edits.
//!
//! [`Conflist`] and [`Conf`] are texts with known positions: an edit replaces parts of the text and keeps all other
//! bytes. [`Directory`] reads a configuration directory as runtimes do, and [`find_dirs`] finds the directories that a
//! runtime uses. The crate never writes files.

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

/// Name of inpod's plugin executable, which is its `type` in a conflist.
pub const INPOD_CNI: &str = "inpod-cni";

/// `type` of Istio's plugin, which inpod replaces.
pub const ISTIO_CNI: &str = "istio-cni";
