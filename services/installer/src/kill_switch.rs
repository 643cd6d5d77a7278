//! Turns the kill switch on and off: while the file exists, the plugin passes every call through.

use std::{fs, io, path::Path};

use inpod_cni::enrolled::{DISABLED_FILE, is_disabled};

use crate::files;

/// Creates the file, and returns whether the file did not exist before.
pub(crate) fn disable(state_dir: &Path) -> io::Result<bool> {
    files::create_private_directory(state_dir)?;
    let is_new = !is_disabled(state_dir);
    if is_new {
        let reason = b"set by installer disable\n";
        files::write(state_dir, DISABLED_FILE, reason, 0o600)?;
    }
    Ok(is_new)
}

/// Removes the file, and returns whether the file existed.
pub(crate) fn enable(state_dir: &Path) -> io::Result<bool> {
    match fs::remove_file(state_dir.join(DISABLED_FILE)) {
        Ok(()) => files::sync_dir(state_dir).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_can_be_set_and_taken_away_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("inpod/plugin");
        assert!(!enable(&state_dir).unwrap());
        assert!(disable(&state_dir).unwrap() && !disable(&state_dir).unwrap());
        assert!(is_disabled(&state_dir));
        assert!(enable(&state_dir).unwrap() && !enable(&state_dir).unwrap());
        assert!(!is_disabled(&state_dir));
    }
}
