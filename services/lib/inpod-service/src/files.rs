//! Reads files that other programs write, and removes files.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Read as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::Path,
};

use nix::fcntl::OFlag;

/// Reads a regular file of at most `limit` bytes, to which the path may lead through symlinks.
///
/// # Errors
///
/// Fails with [`ErrorKind::InvalidData`] if the file is not regular, with [`ErrorKind::FileTooLarge`] if the file is
/// larger, and with the errors of [`std::fs::read`].
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read(path, limit, OFlag::empty())
}

/// Reads a text as [`read_bounded`] does.
///
/// # Errors
///
/// Fails also with [`ErrorKind::InvalidData`] if the text is not UTF-8.
pub fn read_bounded_text(path: &Path, limit: u64) -> io::Result<String> {
    let bytes = read_bounded(path, limit)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Reads a file as [`read_bounded`] does, but rejects a symlink as a file that is not regular.
///
/// # Errors
///
/// See [`read_bounded`] for the reasons.
pub fn read_bounded_nofollow(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read(path, limit, OFlag::O_NOFOLLOW)
}

/// Returns whether a read failed because of what the file is, which no retry changes.
pub fn is_unusable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::InvalidData | ErrorKind::FileTooLarge
    )
}

/// Removes a file, which may be missing.
pub fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn read(path: &Path, limit: u64, flags: OFlag) -> io::Result<Vec<u8>> {
    let flags = (OFlag::O_PATH | flags).bits();
    // O_PATH opens a FIFO without waiting for its writer, and a device without an effect on it.
    let found = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if !found.metadata()?.is_file() {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is not a regular file",
        ));
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= limit) {
        return Ok(bytes);
    }
    let problem = format!("it is larger than {limit} bytes");
    Err(io::Error::new(ErrorKind::FileTooLarge, problem))
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_regular_files_up_to_the_limit_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "text").unwrap();
        symlink("file", path("link")).unwrap();
        symlink("/dev/zero", path("endless")).unwrap();
        mkfifo(&path("fifo"), Mode::S_IRWXU).unwrap();
        fs::create_dir(path("directory")).unwrap();
        let _listener = UnixListener::bind(path("socket")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_bounded(&path(name), 4).unwrap(), b"text", "{name}");
        }
        let larger = read_bounded(&path("file"), 3).unwrap_err();
        assert_eq!(larger.to_string(), "it is larger than 3 bytes");
        for name in ["endless", "fifo", "directory", "socket"] {
            let error = read_bounded(&path(name), 4).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file", "{name}");
        }
        assert!(is_unusable(
            &read_bounded_nofollow(&path("link"), 4).unwrap_err()
        ));
        assert_eq!(read_bounded_nofollow(&path("file"), 4).unwrap(), b"text");
        assert!(!is_unusable(
            &read_bounded(&path("missing"), 4).unwrap_err()
        ));
        fs::write(path("file"), b"\xff").unwrap();
        assert!(is_unusable(
            &read_bounded_text(&path("file"), 4).unwrap_err()
        ));
    }
}
