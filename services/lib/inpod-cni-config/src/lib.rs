//! The CNI chain on disk: where a node keeps it, which file a runtime takes, and edits of it that lose no byte.
//!
//! [`Conflist`] and [`Conf`] are texts with known places: an edit cuts and inserts, and whatever it does not mean stays
//! byte for byte. [`Directory`] reads a configuration directory as a runtime does, [`find`] tells which directories a
//! runtime uses. Nothing here writes.

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

/// The name of the plugin's executable, which is its `type` in a conflist.
pub const INPOD_CNI: &str = "inpod-cni";

/// The `type` of Istio's plugin, which inpod takes the place of.
pub const ISTIO_CNI: &str = "istio-cni";
