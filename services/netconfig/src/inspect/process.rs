use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use inpod_linux::Netns;
use inpod_types::{
    NetnsRef,
    cgroup::{PodKey, find_container},
};

use super::cgroup;
use crate::inspect::InspectError;

pub(crate) const PROC: &str = "/proc";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Clock ticks since boot (proc(5), field 22 of stat). The start time is unique together with the pid.
    pub start_time: u64,
    /// The pid in netconfig's pid namespace.
    pub pid: u32,
    pub command: String,
    /// True if the process's cgroup names the sandbox's container.
    pub sandbox_own: bool,
}

/// Returns the processes in a netns, oldest first. `container_id` identifies the sandbox's own processes. Omits
/// processes that end meanwhile or may not be inspected.
pub fn processes(netns: &Netns, container_id: Option<&str>) -> Result<Vec<Process>, InspectError> {
    let directories =
        process_directories(Path::new(PROC)).map_err(InspectError::reading("the processes"))?;
    let inside = directories.filter(|(_, path)| is_inside(netns, path));
    let found = inside.filter_map(|(pid, path)| read_process(pid, &path, container_id));
    let mut processes: Vec<_> = found.collect();
    processes.sort();
    Ok(processes)
}

pub(crate) fn has_processes(netns: &Netns) -> bool {
    any_process(|path| is_inside(netns, path))
}

/// Returns whether processes use a netns that cannot be opened. Returns `false` if device and inode are unknown.
pub(crate) fn has_processes_in(meant: &NetnsRef) -> bool {
    let (Some(device), Some(inode)) = (meant.device, meant.inode) else {
        return false;
    };
    any_process(|path| {
        let path = path.join("ns/net");
        let found = fs::metadata(&path);
        found.is_ok_and(|found| (found.dev(), found.ino()) == (device, inode))
            && cookie_may_match(meant, &path)
    })
}

/// Compares cookies, since inodes are reused at once. An unreadable cookie counts as the expected cookie.
fn cookie_may_match(meant: &NetnsRef, path: &Path) -> bool {
    meant.cookie.is_none()
        || Netns::open(path, &["/proc".into()]).map_or(true, |netns| meant.agrees_with(&netns.id()))
}

/// Returns whether any process matches, and `true` if processes cannot be listed, so that nothing is released on a
/// guess.
fn any_process(is_it: impl Fn(&Path) -> bool) -> bool {
    process_directories(Path::new(PROC))
        .map_or(true, |mut found| found.any(|(_, path)| is_it(&path)))
}

fn is_inside(netns: &Netns, process: &Path) -> bool {
    netns.is_at(&process.join("ns/net")).unwrap_or(false)
}

/// Finds the holders of the sockets with the given inodes, among the processes in the netns and the processes with the
/// pod's name in the cgroup, which may have left the netns. The result is by inode.
pub(crate) fn socket_holders(
    netns: &Netns,
    pod: Option<PodKey>,
    inodes: &BTreeSet<u32>,
) -> Result<BTreeMap<u32, Process>, InspectError> {
    let directories =
        process_directories(Path::new(PROC)).map_err(InspectError::reading("the processes"))?;
    let is_pods = |path: &Path| {
        let cgroup = || fs::read(path.join("cgroup")).ok();
        let named = || find_container(&String::from_utf8_lossy(&cgroup()?));
        is_inside(netns, path) || pod.is_some_and(|pod| named().is_some_and(|it| it.pod == pod))
    };
    let mut holders = BTreeMap::new();
    for (pid, path) in directories.filter(|(_, path)| is_pods(path)) {
        let held: Vec<_> = sockets_of(&path).filter(|it| inodes.contains(it)).collect();
        let process = (!held.is_empty()).then(|| read_process(pid, &path, None));
        if let Some(process) = process.flatten() {
            holders.extend(held.into_iter().map(|inode| (inode, process.clone())));
        }
    }
    Ok(holders)
}

/// Returns the inodes of a process's open sockets (proc_pid_fd(5)).
fn sockets_of(process: &Path) -> impl Iterator<Item = u32> {
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter_map(|link| {
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        inode.parse().ok()
    })
}

/// The number of scans of procfs since the start, counted because scans are the most expensive part of inspections.
static PROC_SCANS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn proc_scans() -> u64 {
    PROC_SCANS.load(Ordering::Relaxed)
}

/// Lists the processes in procfs with their directories.
pub(crate) fn process_directories(
    proc: &Path,
) -> io::Result<impl Iterator<Item = (u32, PathBuf)> + use<>> {
    PROC_SCANS.fetch_add(1, Ordering::Relaxed);
    let entries = fs::read_dir(proc)?.flatten();
    Ok(entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.path()))
    }))
}

/// Reads a process, and returns `None` if the process has ended.
pub(crate) fn read_process(pid: u32, path: &Path, container_id: Option<&str>) -> Option<Process> {
    let stat = fs::read_to_string(path.join("stat")).ok()?;
    let (start_time, command) = parse_stat(&stat)?;
    let cgroup = fs::read_to_string(path.join("cgroup")).unwrap_or_default();
    Some(Process {
        start_time,
        pid,
        command: command.to_owned(),
        sandbox_own: container_id.is_some_and(|id| cgroup::names(&cgroup, id)),
    })
}

/// Returns start time and command of stat (proc(5)). The command is in parentheses and may contain parentheses, so
/// the last closing parenthesis counts.
fn parse_stat(stat: &str) -> Option<(u64, &str)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_pid, command) = before.split_once('(')?;
    // The first field after the command is field 3.
    let start_time = after.split_ascii_whitespace().nth(22 - 3)?;
    Some((start_time.parse().ok()?, command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(parse_stat(stat), Some((4711, "a) b (c)")));
    }

    #[test]
    fn a_cut_off_line_is_no_process() {
        assert_eq!(parse_stat("7 (a) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }
}
