use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
};

use super::{
    super::facts::{Directory, Inode, Kind, Space},
    HostOptions,
};
use crate::host_fs::{HostFs, Observed};

const INSTALLER_STATE: &str = "/var/lib/inpod/installer";

/// Inspects a file or directory; returns `None` if the path does not exist.
pub(super) fn inode(root: &HostFs, path: &str) -> Observed<Option<Inode>> {
    match fs::metadata(root.at(path)) {
        Ok(found) => {
            let of = found.file_type();
            let kinds = [
                (of.is_dir(), Kind::Directory),
                (of.is_socket(), Kind::Socket),
                (of.is_file(), Kind::File),
            ];
            let kind = kinds
                .iter()
                .find(|(is, _)| *is)
                .map_or(Kind::Other, |(_, kind)| *kind);
            Ok(Some(Inode {
                mode: found.mode() & 0o7777,
                uid: found.uid(),
                kind,
            }))
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(format!("cannot inspect {path}: {error}")),
    }
}

pub(super) fn directories(root: &HostFs, paths: &HostOptions) -> Vec<Directory> {
    let checkpoint = format!("{}/pod-events", paths.run_dir);
    let paths = [
        checkpoint,
        paths.plugin_state_dir.clone(),
        INSTALLER_STATE.to_owned(),
    ];
    let directory = |path: String| Directory {
        inode: inode(root, &path),
        space: space(root, &path),
        path,
    };
    paths.into_iter().map(directory).collect()
}

fn space(root: &HostFs, path: &str) -> Observed<Space> {
    let found = rustix::fs::statvfs(root.at(path))
        .map_err(|error| format!("cannot inspect {path}: {error}"))?;
    Ok(Space {
        bytes: found.f_bavail.saturating_mul(found.f_frsize),
        files: found.f_favail,
        all_files: found.f_files,
        is_read_only: found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
    })
}

/// Returns whether the kill switch is on. A dangling link counts as the file.
pub(super) fn kill_switch(root: &HostFs, state_dir: &str) -> Observed<bool> {
    match fs::symlink_metadata(root.at(state_dir).join("disabled")) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(format!("cannot inspect {state_dir}/disabled: {error}")),
    }
}

/// Counts the entries of the spool, without unfinished writes, whose names start with a dot.
pub(super) fn spool(root: &HostFs, state_dir: &str) -> Observed<usize> {
    let names = root
        .names(format!("{state_dir}/spool"))?
        .unwrap_or_default();
    Ok(names.iter().filter(|name| !name.starts_with('.')).count())
}
