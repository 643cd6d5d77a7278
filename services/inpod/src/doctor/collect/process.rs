use std::fs;

use super::super::facts::{Process, Zds};
use super::state::inode;
use crate::host_fs::{HostFs, Observed};

pub(super) fn process(root: &HostFs, pid: i32) -> Process {
    let limits = root.text(format!("/proc/{pid}/limits"));
    Process {
        pid,
        label: root
            .text(format!("/proc/{pid}/attr/current"))
            .map(|text| text.trim_matches(['\0', '\n']).to_owned()),
        open_files: open_files(root, pid),
        file_limit: limits.and_then(|text| file_limit(&text)),
    }
}

fn open_files(root: &HostFs, pid: i32) -> Observed<u64> {
    let path = format!("/proc/{pid}/fd");
    let entries =
        fs::read_dir(root.at(&path)).map_err(|error| format!("cannot read {path}: {error}"))?;
    u64::try_from(entries.count()).map_err(|error| error.to_string())
}

/// Parses the soft limit of open files (proc_pid_limits(5)).
fn file_limit(text: &str) -> Observed<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    match soft {
        Some("unlimited") => Ok(u64::MAX),
        Some(number) => number
            .parse()
            .map_err(|_| format!("not a number of files: {number:?}")),
        None => Err("found no limit of open files".to_owned()),
    }
}

/// Reads the socket table in `/proc` of the process `broker`, because the kernel lists only the sockets of the reader's
/// network namespace.
pub(super) fn zds(root: &HostFs, path: &str, broker: Option<i32>) -> Zds {
    let of = broker.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let table = root.text(format!("/proc/{of}/net/unix"));
    Zds {
        path: path.to_owned(),
        socket: inode(root, path),
        holders: table.and_then(|table| holders(root, &listening(&table, path))),
    }
}

/// Returns the inodes of the sockets that listen at a path, as `socket:[INODE]` (in `/proc/net/unix`, flags, state and
/// inode precede the path).
fn listening(table: &str, path: &str) -> Vec<String> {
    // `/var/run` and `/run` are treated as the same directory, so that a socket bound below one is found below the
    // other.
    let plain = |path: &str| {
        path.strip_prefix("/var/run/")
            .map_or_else(|| path.to_owned(), |rest| format!("/run/{rest}"))
    };
    let inode = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, _, _, flags, _, _, inode, bound] = fields.as_slice() else {
            return None;
        };
        // A listening socket has only the flag __SO_ACCEPTCON.
        let listens = *flags == "00010000";
        (listens && plain(bound) == plain(path)).then(|| format!("socket:[{inode}]"))
    };
    table.lines().filter_map(inode).collect()
}

fn holders(root: &HostFs, sockets: &[String]) -> Observed<Vec<(i32, String)>> {
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let pids = root.names("/proc")?.unwrap_or_default();
    let pids = pids.iter().filter_map(|name| name.parse::<i32>().ok());
    let found = pids.filter(|pid| has_open(root, *pid, sockets)).map(|pid| {
        let command = root.text(format!("/proc/{pid}/comm")).unwrap_or_default();
        (pid, command.trim().to_owned())
    });
    Ok(found.collect())
}

fn has_open(root: &HostFs, pid: i32, sockets: &[String]) -> bool {
    let Ok(entries) = fs::read_dir(root.at(format!("/proc/{pid}/fd"))) else {
        return false;
    };
    let mut targets = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.any(|target| {
        sockets
            .iter()
            .any(|socket| target.as_os_str() == socket.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_the_one_that_counts() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max open files            1024                 524288               files\n";
        assert_eq!(file_limit(text), Ok(1024));
        assert_eq!(
            file_limit("Max open files unlimited unlimited files"),
            Ok(u64::MAX)
        );
        assert!(file_limit("").is_err());
    }

    #[test]
    fn a_socket_is_found_by_its_path_where_somebody_listens() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0: 00000002 00000000 00010000 0005 01 77 /run/ztunnel/ztunnel.sock\n\
            1: 00000003 00000000 00000000 0005 03 78 /run/ztunnel/ztunnel.sock\n\
            2: 00000002 00000000 00010000 0001 01 79\n";
        for path in ["/var/run/ztunnel/ztunnel.sock", "/run/ztunnel/ztunnel.sock"] {
            assert_eq!(listening(table, path), ["socket:[77]"], "{path}");
        }
        assert!(listening(table, "/run/other.sock").is_empty());
    }
}
