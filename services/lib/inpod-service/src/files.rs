//! Reads files that other programs write, and removes files.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Read as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::Path,
};

use nix::{
    fcntl::OFlag,
    sys::statfs::{DEBUGFS_MAGIC, FsType, PROC_SUPER_MAGIC, SYSFS_MAGIC, TRACEFS_MAGIC, fstatfs},
};

/// File systems with regular files whose read blocks or has side effects, such as `/proc/kmsg` and `trace_pipe`.
const KERNEL_FILE_SYSTEMS: [FsType; 4] =
    [PROC_SUPER_MAGIC, SYSFS_MAGIC, TRACEFS_MAGIC, DEBUGFS_MAGIC];

/// Reads a regular file of at most `limit` bytes, to which the path may lead through symlinks.
///
/// # Errors
///
/// Fails with [`ErrorKind::InvalidData`] if the file is not regular or the kernel generates its content, with
/// [`ErrorKind::FileTooLarge`] if the file is larger, and with the errors of [`std::fs::read`].
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read(&stored_file(path, OFlag::empty())?, limit)
}

/// Reads a file like [`read_bounded`], and also files of procfs and sysfs. The read of a file such as `/proc/kmsg`
/// blocks, so the caller must choose the file.
///
/// # Errors
///
/// See [`read_bounded`] for the reasons.
pub fn read_bounded_any_fs(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read(&regular_file(path, OFlag::empty())?, limit)
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
    read(&stored_file(path, OFlag::O_NOFOLLOW)?, limit)
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

/// Opens a file that a program has written.
fn stored_file(path: &Path, flags: OFlag) -> io::Result<File> {
    let found = regular_file(path, flags)?;
    if KERNEL_FILE_SYSTEMS.contains(&fstatfs(&found)?.filesystem_type()) {
        let problem = "it is in procfs, sysfs, tracefs or debugfs, where reading may block";
        return Err(io::Error::new(ErrorKind::InvalidData, problem));
    }
    Ok(found)
}

/// Opens a regular file with `O_PATH`, which opens a FIFO without waiting for its writer, and a device without an
/// effect on the device.
fn regular_file(path: &Path, flags: OFlag) -> io::Result<File> {
    let flags = (OFlag::O_PATH | flags).bits();
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
    Ok(found)
}

fn read(found: &File, limit: u64) -> io::Result<Vec<u8>> {
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

    #[test]
    fn procfs_and_sysfs_files_are_read_only_on_request() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        // A read of /proc/kmsg would block.
        for target in ["/proc/self/status", "/sys/kernel/notes", "/proc/kmsg"] {
            symlink(target, &link).unwrap();
            let error = read_bounded(&link, u64::MAX).unwrap_err();
            assert!(is_unusable(&error), "{target}: {error}");
            assert!(error.to_string().contains("procfs"), "{target}: {error}");
            fs::remove_file(&link).unwrap();
        }
        let status = read_bounded_any_fs(Path::new("/proc/self/status"), u64::MAX).unwrap();
        assert!(status.starts_with(b"Name:"));
    }
}
