//! Writes files atomically, with contents that survive a power failure.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Creates a directory with mode 0700, together with all missing parents.
pub(crate) fn create_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes a file atomically, through a temporary file whose name begins with a dot and must not
/// exist yet.
pub(crate) fn write_file(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}"));
    let renamed =
        write_synced(&temporary, content).and_then(|()| fs::rename(&temporary, dir.join(name)));
    if renamed.is_err() {
        // The removal is best effort: readers skip leftovers, and the caller needs the first error.
        let _ignored = fs::remove_file(&temporary);
    }
    renamed?;
    // Only an fsync of the directory makes the rename durable.
    File::open(dir)?.sync_all()
}

fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}
