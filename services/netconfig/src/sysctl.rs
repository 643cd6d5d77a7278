//! Reads and writes sysctls of a pod's netns, at a cost that does not grow with the number of pods.
//!
//! Every netns has its own `/proc/sys/net/ipv4`. While a netns lives, the kernel keeps a dentry for each looked-up
//! file, and the dentries of all netns hash to one name (`proc_sys_compare` in fs/proc/proc_sysctl.c), so the first
//! lookup for another netns compares all dentries. A procfs mount starts without dentries (since Linux 5.8).
//! Lookups therefore use private mounts, each for a few netns.

mod ports;

pub(crate) use ports::Ports;

use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    sync::Arc,
};

use nix::{
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};
use parking_lot::Mutex;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The sysctl by which a closing listener hands its accept queue to another listener of the port. A handover
/// between ztunnels needs the sysctl: 88 of 200 connections were reset without it (services/docs/facts/kernel.md,
/// 6). Exists since Linux 5.14.
const TCP_MIGRATE_REQ: &str = "sys/net/ipv4/tcp_migrate_req";

pub(crate) const TCP_MIGRATE_REQ_NAME: &str = "net.ipv4.tcp_migrate_req";

/// The ports that the kernel does not choose by itself for a socket. Otherwise, an application's connection could
/// occupy a port of ztunnel's.
const RESERVED_PORTS: &str = "sys/net/ipv4/ip_local_reserved_ports";

pub(crate) const RESERVED_PORTS_NAME: &str = "net.ipv4.ip_local_reserved_ports";

/// The size of the longest list of ports that one write can replace.
const MAX_RESERVED_BYTES: usize = 4000;

/// The sysctl for `lo`, which is the interface that matters to redirection.
const DISABLE_IPV6: &str = "sys/net/ipv6/conf/lo/disable_ipv6";

/// A file that exists in every netns and is owned by root of the owning user namespace.
const OWNERSHIP_PROBE_PATH: &str = "sys/net/ipv4/ip_forward";

/// The number of netns per mount. Creating and unmounting takes 20 to 30 us; each looked-up netns makes the first
/// lookup for another netns 0.1 to 0.3 us longer per sysctl (measured, Linux 6.18).
const MAX_USES: u32 = 32;

#[derive(Clone, Debug, Default)]
pub struct Sysctls(Arc<Mutex<Recycled<OwnedFd>>>);

impl Sysctls {
    /// Returns access to the sysctls of a netns, which the calling thread may enter later.
    pub(crate) fn open_for_netns(&self) -> io::Result<NetnsSysctls> {
        self.0.lock().get(procfs).map(NetnsSysctls)
    }
}

/// A value replaced after a number of uses. Users of the previous value keep that value alive.
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

/// Opens a private mount, or `/proc` if mounting is not permitted, which only raises the cost.
fn procfs() -> io::Result<OwnedFd> {
    mount().or_else(|error| {
        tracing::debug!(%error, "Cannot mount a procfs; using /proc");
        File::open("/proc").map(Into::into)
    })
}

/// Mounts a procfs attached nowhere, which is unmounted on close. The mount shows processes of the caller's pid
/// namespace. Its `sys/net` belongs to the accessing thread's netns (`net_ctl_header_lookup` in net/sysctl_net.c),
/// and is writable even where a container's `/proc/sys` is not.
fn mount() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mounted = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok(mounted)
}

/// The sysctl `net.ipv4.tcp_migrate_req` of the netns in which the file was opened, even when used from another
/// netns: the file belongs to the netns of its lookup (`proc_sys_call_handler` in fs/proc/proc_sysctl.c).
#[derive(Debug)]
pub(crate) struct MigrateReq {
    /// The file opened for writing, or the reason why the sysctl may only be read.
    file: io::Result<File>,
    pub(crate) is_on: bool,
}

impl MigrateReq {
    pub(crate) fn set(&mut self, on: bool) -> io::Result<()> {
        let refused = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
        let file = self.file.as_ref().map_err(refused)?;
        file.write_all_at(if on { b"1" } else { b"0" }, 0)?;
        self.is_on = on;
        Ok(())
    }
}

/// The sysctl `net.ipv4.ip_local_reserved_ports`, like [`MigrateReq`] of the netns in which the file was opened.
#[derive(Debug)]
pub(crate) struct ReservedPorts {
    file: File,
    pub(crate) ports: Ports,
}

impl ReservedPorts {
    pub(crate) fn set(&mut self, ports: &Ports) -> io::Result<()> {
        self.file.write_all_at(format!("{ports}\n").as_bytes(), 0)?;
        self.ports = ports.clone();
        Ok(())
    }
}

/// Sysctls of the netns in which the calling thread is at the time of access.
#[derive(Debug)]
pub(crate) struct NetnsSysctls(Arc<OwnedFd>);

impl NetnsSysctls {
    /// Returns the sysctl, even if writing is not permitted, and `None` if the kernel lacks the sysctl.
    pub(crate) fn migrates(&self) -> io::Result<Option<MigrateReq>> {
        let file = self.open(TCP_MIGRATE_REQ, OFlag::O_RDWR);
        let mut text = [0; 1];
        match &file {
            Ok(file) => file.read_exact_at(&mut text, 0)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(_) => self
                .open(TCP_MIGRATE_REQ, OFlag::O_RDONLY)?
                .read_exact_at(&mut text, 0)?,
        }
        Ok(Some(MigrateReq {
            file,
            is_on: text != *b"0",
        }))
    }

    /// Returns the sysctl if writable and short enough to be replaced by one write.
    pub(crate) fn reserved_ports(&self) -> Option<ReservedPorts> {
        let file = self.open(RESERVED_PORTS, OFlag::O_RDWR).ok()?;
        let mut text = [0; MAX_RESERVED_BYTES];
        let length = file.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        let ports = text.ends_with('\n').then(|| text.parse().ok())??;
        Some(ReservedPorts { file, ports })
    }

    /// Returns whether the netns has IPv6, and `false` if the file is missing. If the file is unreadable, IPv6 is
    /// assumed, and applying rules will show whether the assumption holds.
    pub(crate) fn has_ipv6(&self) -> bool {
        match self.read(DISABLE_IPV6) {
            Ok(text) => text.trim() != "1",
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    /// Returns the uid, as numbered in netconfig's user namespace, of root in the owning user namespace, which owns
    /// the sysctls (`net_ctl_set_ownership` in net/sysctl_net.c).
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

    fn give_up_mounting() {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).unwrap();
    }

    fn switches_and_reads_its_own(sysctls: &Sysctls) {
        let netns = sysctls.open_for_netns().unwrap();
        let is_on = || netns.migrates().unwrap().unwrap().is_on;
        for on in [true, false] {
            netns.migrates().unwrap().unwrap().set(on).unwrap();
            assert_eq!(is_on(), on);
        }
        for (text, wanted) in [("1", false), ("0", true)] {
            std::fs::write(Path::new("/proc").join(DISABLE_IPV6), text).unwrap();
            assert_eq!(netns.has_ipv6(), wanted);
        }
    }

    #[test]
    fn a_kernel_without_ipv6_has_none_in_any_netns() {
        let without = tempfile::tempdir().unwrap();
        let opened = File::open(without.path()).unwrap();
        assert!(!NetnsSysctls(Arc::new(opened.into())).has_ipv6());
    }

    #[test]
    fn one_mount_shows_each_netns_its_own_sysctls() {
        let sysctls = Sysctls::default();
        in_a_new_netns(|| {
            let migrates = || {
                let netns = sysctls.open_for_netns().unwrap();
                netns.migrates().unwrap().unwrap()
            };
            migrates().set(true).unwrap();
            in_a_new_netns(|| switches_and_reads_its_own(&sysctls));
            assert!(migrates().is_on);
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
