//! Finds out whether the files of a directory are lost when the node reboots.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::sys::{
    stat::{major, minor},
    statfs::{FsType, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs},
};

use crate::directory::resolve;

/// linux/magic.h, without a constant in libc.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// The directories of a node that are a tmpfs wherever systemd or the Filesystem Hierarchy Standard is followed.
const VOLATILE_DIRS: [&str; 3] = ["/run", "/tmp", "/dev/shm"];

/// Returns the file system that loses the directory's files at a reboot, or `None` if the directory keeps its files or
/// does not exist.
pub(crate) fn volatile_file_system(root: &Path, dir: &Path) -> Option<String> {
    let found = resolve(root, dir).ok()?;
    match statfs(&found).ok()?.filesystem_type() {
        TMPFS_MAGIC => Some("tmpfs".to_owned()),
        RAMFS_MAGIC => Some("ramfs".to_owned()),
        OVERLAYFS_SUPER_MAGIC => {
            let upper = upper_directory(&found)?;
            let is_volatile = VOLATILE_DIRS.iter().any(|dir| upper.starts_with(dir))
                || volatile_file_system(root, &upper).is_some();
            is_volatile.then(|| format!("an overlay whose changes are in {}", upper.display()))
        }
        _ => None,
    }
}

/// Returns the directory with an overlay's changes, as the mounting process named it (proc_pid_mountinfo(5)).
fn upper_directory(path: &Path) -> Option<PathBuf> {
    let device = fs::metadata(path).ok()?.dev();
    let device = format!("{}:{}", major(device), minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let is_mount = |line: &&str| line.split(' ').nth(2) == Some(&device);
    let options = mounts.lines().find(is_mount)?.rsplit(' ').next()?;
    let mut options = options.split(',');
    options.find_map(|option| Some(option.strip_prefix("upperdir=")?.into()))
}
