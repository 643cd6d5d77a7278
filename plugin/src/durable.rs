//! Files that are there whole or not at all, also after a power failure.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Makes a directory that only its owner may look into, where it is missing.
pub(crate) fn create_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Puts a file in place. It is written under a name that begins with a dot, which must be free.
pub(crate) fn write_file(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}"));
    let renamed =
        write_synced(&temporary, content).and_then(|()| fs::rename(&temporary, dir.join(name)));
    if renamed.is_err() {
        // What is left of it would only be skipped and cleaned up later; the first error is the one to tell.
        let _ignored = fs::remove_file(&temporary);
    }
    renamed?;
    // The rename itself is on disk only when its directory is.
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
