//! Access to the sysctls of a pod's netns, at a cost that does not grow with the number of pods.
//!
//! Every netns has its own `/proc/sys/net/ipv4`. The kernel keeps a dentry for each one that was looked up for as long
//! as the netns lives, and all of them hash to one name (`proc_sys_compare` in fs/proc/proc_sysctl.c): the first lookup
//! for another netns compares them all. Each procfs mount starts without dentries (since Linux 5.8), so this module
//! looks up through private mounts, each used for a few netns.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    sync::{Arc, Mutex, PoisonError},
};

use nix::{
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// On close of a listener, hands connections in its accept queue over to another listener of the same port. A
/// handover between ztunnels needs this: 88 of 200 connections were reset without it (services/docs/facts/kernel.md,
/// 6). Since Linux 5.14.
const TCP_MIGRATE_REQ: &str = "sys/net/ipv4/tcp_migrate_req";

pub(crate) const TCP_MIGRATE_REQ_NAME: &str = "net.ipv4.tcp_migrate_req";

/// The switch of IPv6 on `lo`, which is the interface that matters to redirection.
const DISABLE_IPV6: &str = "sys/net/ipv6/conf/lo/disable_ipv6";

/// A file that exists in every netns. Its owner is root of the user namespace that owns the netns.
const OWNERSHIP_PROBE_PATH: &str = "sys/net/ipv4/ip_forward";

/// Number of netns that one mount is used for. Creating and unmounting one takes 20 to 30 us; each netns
/// that was looked up through it makes the first lookup for another netns 0.1 to 0.3 us longer per
/// sysctl (measured, Linux 6.18).
const MAX_USES: u32 = 32;

/// Opens the sysctls of netns.
#[derive(Clone, Debug, Default)]
pub struct Sysctls(Arc<Mutex<Recycled<OwnedFd>>>);

impl Sysctls {
    /// Returns access to the sysctls of one netns. The calling thread need not be in it yet.
    pub(crate) fn open_for_netns(&self) -> io::Result<NetnsSysctls> {
        let mut recycled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recycled.get(procfs).map(NetnsSysctls)
    }
}

/// A value that is replaced after a number of uses. Users of the previous value keep it alive.
#[derive(Debug)]
struct Recycled<T> {
    current: Option<Arc<T>>,
    uses_left: u32,
}

impl<T> Default for Recycled<T> {
    fn default() -> Self {
        Self {
            current: None,
            uses_left: 0,
        }
    }
}

impl<T> Recycled<T> {
    fn get(&mut self, make: impl FnOnce() -> io::Result<T>) -> io::Result<Arc<T>> {
        let kept = self.current.take().filter(|_| self.uses_left > 0);
        let (value, uses_left) = match kept {
            Some(value) => (value, self.uses_left),
            None => (Arc::new(make()?), MAX_USES),
        };
        self.uses_left = uses_left.saturating_sub(1);
        self.current = Some(Arc::clone(&value));
        Ok(value)
    }
}

/// Opens a private procfs mount, or `/proc` if mounting is not permitted: then only the cost grows.
fn procfs() -> io::Result<OwnedFd> {
    mount().or_else(|error| {
        tracing::debug!(%error, "Cannot mount a procfs; using /proc");
        File::open("/proc").map(Into::into)
    })
}

/// Mounts a procfs that is attached nowhere and unmounted on close. Its processes are those of the calling process's
/// pid namespace. Its `sys/net` is that of the netns of the accessing thread (`net_ctl_header_lookup` in
/// net/sysctl_net.c), and is writable even where a container's `/proc/sys` is read-only.
fn mount() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mounted = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok(mounted)
}

/// The sysctls of the netns that the calling thread is in at the time of access.
#[derive(Debug)]
pub(crate) struct NetnsSysctls(Arc<OwnedFd>);

impl NetnsSysctls {
    /// Returns whether `tcp_migrate_req` is on, `None` if the kernel does not have it.
    pub(crate) fn migrates(&self) -> io::Result<Option<bool>> {
        match self.read(TCP_MIGRATE_REQ) {
            Ok(text) => Ok(Some(text.trim() != "0")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn set_migrates(&self, on: bool) -> io::Result<()> {
        let mut file = self.open(TCP_MIGRATE_REQ, OFlag::O_WRONLY)?;
        file.write_all(if on { b"1" } else { b"0" })
    }

    /// Returns whether IPv6 is enabled. A kernel without IPv6 has no such file. If it cannot be read for another
    /// reason, IPv6 is assumed, and applying rules will show.
    pub(crate) fn has_ipv6(&self) -> bool {
        match self.read(DISABLE_IPV6) {
            Ok(text) => text.trim() != "1",
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    /// Returns the uid of root in the user namespace that owns the netns, as this process sees it: that root owns the
    /// sysctls of the netns (`net_ctl_set_ownership` in net/sysctl_net.c).
    pub(crate) fn root(&self) -> io::Result<u32> {
        let owned = self.open(OWNERSHIP_PROBE_PATH, OFlag::O_RDONLY)?;
        Ok(owned.metadata()?.uid())
    }

    fn read(&self, path: &str) -> io::Result<String> {
        let mut text = String::new();
        let mut file = self.open(path, OFlag::O_RDONLY)?;
        file.read_to_string(&mut text)?;
        Ok(text)
    }

    fn open(&self, path: &str, access: OFlag) -> io::Result<File> {
        let fd = openat(&self.0, path, access | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(fd.into())
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, thread};

    use nix::sched::{CloneFlags, unshare};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    /// Runs a test in a netns that ends with the thread. Needs root.
    fn in_a_new_netns(test: impl FnOnce() + Send) {
        let run = move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("this test makes a netns: run it as root");
            test();
        };
        thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    /// Drops the calling thread's right to mount.
    fn give_up_mounting() {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).unwrap();
    }

    fn switches_and_reads_its_own(sysctls: &Sysctls) {
        let netns = sysctls.open_for_netns().unwrap();
        for on in [true, false] {
            netns.set_migrates(on).unwrap();
            assert_eq!(netns.migrates().unwrap(), Some(on));
        }
        for (text, wanted) in [("1", false), ("0", true)] {
            std::fs::write(Path::new("/proc").join(DISABLE_IPV6), text).unwrap();
            assert_eq!(netns.has_ipv6(), wanted);
        }
    }

    #[test]
    fn one_mount_shows_each_netns_its_own_sysctls() {
        let sysctls = Sysctls::default();
        in_a_new_netns(|| {
            sysctls
                .open_for_netns()
                .unwrap()
                .set_migrates(true)
                .unwrap();
            in_a_new_netns(|| switches_and_reads_its_own(&sysctls));
            assert_eq!(
                sysctls.open_for_netns().unwrap().migrates().unwrap(),
                Some(true)
            );
        });
    }

    #[test]
    fn who_may_not_mount_a_procfs_uses_the_one_that_is_there() {
        in_a_new_netns(|| {
            give_up_mounting();
            let refused = mount().unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            switches_and_reads_its_own(&Sysctls::default());
        });
    }

    #[test]
    fn what_was_used_often_enough_is_made_anew() {
        let (mut recycled, mut made) = (Recycled::default(), 0);
        let mut used = Vec::new();
        for _ in 0..2 * MAX_USES + 1 {
            let make = || {
                made += 1;
                Ok(made)
            };
            used.push(*recycled.get(make).unwrap());
        }
        let times = |which| used.iter().filter(|used| **used == which).count();
        let visits = usize::try_from(MAX_USES).unwrap();
        assert_eq!([1, 2, 3].map(times), [visits, visits, 1]);
    }

    #[test]
    fn what_could_not_be_made_is_tried_again() {
        let mut recycled = Recycled::default();
        let failed = recycled.get(|| Err(io::ErrorKind::PermissionDenied.into()));
        assert!(failed.is_err());
        assert_eq!(*recycled.get(|| Ok(7)).unwrap(), 7);
    }
}
