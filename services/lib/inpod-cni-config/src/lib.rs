//! The CNI chain on disk: where a node keeps it, which file a runtime takes, and edits of it that lose no byte.
//!
//! [`Conflist`] and [`Conf`] are texts with known places: an edit cuts and inserts, and whatever it does not mean stays
//! byte for byte. [`Directory`] reads a configuration directory as a runtime does, [`find`] tells which directories a
//! runtime uses. Nothing here writes.

mod conf;
mod conflist;
mod directory;
mod error;
mod json;
mod places;
mod platforms;
mod runtimes;

pub use conf::Conf;
pub use conflist::{Conflist, Entry, Plugin, edit::same};
pub use directory::{Directory, Loaded, NetworkFile, is_loaded};
pub use error::{Malformed, ReadError};
pub use places::{Origin, Places, find};
pub use platforms::{PLATFORMS, Platform};
pub use runtimes::{RuntimeSays, containerd, crio};

/// The name of the plugin's executable, which is its `type` in a conflist.
pub const OURS: &str = "inpod-cni";

/// The `type` of Istio's plugin, which inpod takes the place of.
pub const INCUMBENT: &str = "istio-cni";
