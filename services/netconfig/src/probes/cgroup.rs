//! A cgroup's inode number, and the cgroup namespace to use it from. The kernel counts levels from the root of the
//! calling thread's cgroup namespace (nft_socket_cgroup_subtree_level in net/netfilter/nft_socket.c; before Linux
//! 6.11 and its stable releases, from the real root), and a container has its own.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    thread,
};

use nix::sched::CloneFlags;

use super::{selector::Cgroup, settings::CgroupPath};
use crate::error::SelectError;

/// With the host's pid namespace the node's init process, otherwise the container's, which shares
/// this process's cgroup namespace.
const INIT_PROC: &str = "/proc/1";
const SELF_PROC: &str = "/proc/self";

/// Resolves the path as the node's init process does, if accessible, or else as this process does.
pub(crate) fn find(path: &CgroupPath) -> Result<Cgroup, SelectError> {
    let proc = if can_use_host_view() {
        INIT_PROC
    } else {
        SELF_PROC
    };
    let mounts = fs::read_to_string(Path::new(proc).join("mountinfo"));
    let mount = mounts.ok().and_then(|text| cgroup2_mount_point(&text));
    let mount = mount.ok_or(SelectError::NoCgroups)?;
    let mount = mount.strip_prefix("/").unwrap_or(&mount).to_owned();
    let directory = Path::new(proc).join("root").join(mount).join(path.as_str());
    let found = fs::metadata(directory).ok().filter(fs::Metadata::is_dir);
    let found = found.ok_or_else(|| SelectError::NoCgroup(path.as_str().to_owned()))?;
    Ok(Cgroup {
        path: path.as_str().to_owned(),
        level: path.level(),
        id: found.ino(),
    })
}

/// Runs `work` on a temporary thread that sees cgroups as [`find`] does.
pub(crate) fn in_host_cgroup_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let namespace = |of| fs::metadata(Path::new(of).join("ns/cgroup")).map(|found| found.ino());
    if !can_use_host_view() || namespace(INIT_PROC)? == namespace(SELF_PROC)? {
        return Ok(work());
    }
    let view = File::open(Path::new(INIT_PROC).join("ns/cgroup"))?;
    thread::scope(|scope| {
        let seeing = scope.spawn(move || {
            enter_cgroup_namespace(&view)?;
            Ok(work())
        });
        let panicked = |_| Err(io::Error::other("the thread panicked"));
        seeing.join().unwrap_or_else(panicked)
    })
}

#[expect(
    clippy::disallowed_methods,
    reason = "a cgroup namespace, which netns know nothing of"
)]
fn enter_cgroup_namespace(view: &File) -> io::Result<()> {
    Ok(nix::sched::setns(
        view.as_fd(),
        CloneFlags::CLONE_NEWCGROUP,
    )?)
}

fn can_use_host_view() -> bool {
    let first = Path::new(INIT_PROC);
    File::open(first.join("ns/cgroup")).is_ok() && fs::metadata(first.join("root/.")).is_ok()
}

/// Finds cgroup2's root (proc_pid_mountinfo(5): root is the fourth field, mount point the fifth, the type
/// follows a single hyphen).
fn cgroup2_mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, mount_point) = (fields.next()?, fields.next()?);
        (source.starts_with("cgroup2 ") && root == "/").then(|| mount_point.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_is_found_where_it_is_mounted_with_its_root() {
        let text = "\
            25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            31 25 0:27 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
            32 25 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 master:2 - cgroup2 cgroup2 rw\n";
        assert_eq!(
            cgroup2_mount_point(text).unwrap(),
            Path::new("/sys/fs/cgroup/unified")
        );
        assert_eq!(cgroup2_mount_point(text.lines().nth(1).unwrap()), None);
        assert_eq!(cgroup2_mount_point("nonsense"), None);
    }

    #[test]
    fn a_cgroup_that_is_not_there_is_named() {
        let path = "cgroup:no.such.slice/x".parse().unwrap();
        let super::super::settings::ProbeMatch::Cgroup(path) = path else {
            panic!("{path}");
        };
        let error = find(&path).unwrap_err();
        let told = [
            SelectError::NoCgroup("no.such.slice/x".to_owned()),
            // Without cgroup2 on the machine.
            SelectError::NoCgroups,
        ];
        assert!(told.contains(&error), "{error}");
    }
}
