use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use inpod_service::cgroup_containers;
use netlink_bindings::{
    inet_diag::{OpTcpDiagDump, ReqV2, Request},
    traits::NetlinkRequest,
};
use nix::sys::socket::SockProtocol;

use crate::{
    inspect::parse_stat,
    netlink::{KernelError, Socket},
};

/// The API's, unless configured otherwise.
const PORT: u16 = 10250;
/// AF_INET and AF_INET6.
const FAMILIES: [u8; 2] = [2, 10];
const TCP: u8 = 6;
/// TCP_LISTEN of linux/tcp_states.h.
const LISTEN: u8 = 10;

/// The kubelet's comm (proc(5)): on its own, in MicroK8s, as a part of k3s.
const NAMES: [&str; 2] = ["kubelet", "kubelite"];
const NAMES_OF_K3S: [&str; 3] = ["k3s", "k3s-server", "k3s-agent"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kubelet {
    /// In netconfig's pid namespace.
    pub(crate) pid: u32,
    start_time: u64,
    pub(crate) user: u32,
}

impl Kubelet {
    pub(crate) fn is_alive(&self) -> bool {
        let path = Path::new("/proc").join(self.pid.to_string());
        start_time(&path) == Some(self.start_time)
    }
}

/// A process in a container is never the kubelet, whatever its name.
pub(crate) fn find() -> Option<Kubelet> {
    let listening = listening().unwrap_or_else(|error| {
        tracing::warn!(%error, "Cannot list the sockets that listen on the kubelet's port");
        BTreeSet::new()
    });
    search(Path::new("/proc"), &listening)
}

/// Inodes of sockets that listen on the kubelet's port.
fn listening() -> Result<BTreeSet<u32>, KernelError> {
    const ACT: &str = "read the listening sockets";
    let socket = Socket::open(SockProtocol::NetlinkSockDiag);
    let mut socket = socket.map_err(|error| KernelError::new(ACT, error))?;
    let mut found = BTreeSet::new();
    for family in FAMILIES {
        let header = ReqV2 {
            family,
            protocol: TCP,
            states: 1 << LISTEN,
            ..ReqV2::new()
        };
        let request = Request::new().op_tcp_diag_dump(&header);
        for payload in socket.dump(ACT, &request)? {
            let (message, _) = <OpTcpDiagDump<'_> as NetlinkRequest>::decode_reply(&payload);
            if message.sockid.sport() == PORT {
                found.insert(message.inode);
            }
        }
    }
    Ok(found)
}

/// Finds a process with such a socket, preferably with the kubelet's name; else one with that name.
fn search(proc: &Path, listening: &BTreeSet<u32>) -> Option<Kubelet> {
    let all: Vec<_> = processes(proc);
    let (set_addresses, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|process| process.has_kubelet_name());
    let mut in_order = set_addresses.iter().chain(&others);
    let listens = in_order
        .find(|process| process.holds_any(listening) && process.is_outside_containers(proc));
    let found = listens.or_else(|| {
        let mut set_addresses = set_addresses.iter();
        set_addresses.find(|process| process.is_kubelet() && process.is_outside_containers(proc))
    });
    found.and_then(|process| process.describe())
}

struct Process {
    pid: u32,
    path: PathBuf,
    command: String,
}

/// Orders by pid. Omits processes that end meanwhile.
fn processes(proc: &Path) -> Vec<Process> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let path = entry.path();
            let command = fs::read_to_string(path.join("comm")).ok()?;
            let command = command.trim_end().to_owned();
            Some(Process { pid, path, command })
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

impl Process {
    fn has_kubelet_name(&self) -> bool {
        let mut names = NAMES.iter().chain(&NAMES_OF_K3S);
        names.any(|name| self.command == *name)
    }

    /// Except for k3s, the arguments must name the kubelet, too.
    fn is_kubelet(&self) -> bool {
        let names_it = || {
            let arguments = fs::read(self.path.join("cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments).to_lowercase();
            arguments.contains("kubelet")
        };
        NAMES_OF_K3S.contains(&self.command.as_str()) || names_it()
    }

    fn holds_any(&self, sockets: &BTreeSet<u32>) -> bool {
        if sockets.is_empty() {
            return false;
        }
        let entries = fs::read_dir(self.path.join("fd")).into_iter().flatten();
        let mut links = entries
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok());
        links.any(|link| {
            let inode = link.to_str().and_then(|text| text.strip_prefix("socket:["));
            let inode = inode.and_then(|text| text.strip_suffix(']')?.parse().ok());
            inode.is_some_and(|inode| sockets.contains(&inode))
        })
    }

    /// Ignores containers that init is in: the node itself may be one.
    fn is_outside_containers(&self, proc: &Path) -> bool {
        let of = |path: &Path| {
            fs::read_to_string(path.join("cgroup")).map(|text| cgroup_containers(&text))
        };
        let node = of(&proc.join("1")).unwrap_or_default();
        of(&self.path).is_ok_and(|own| own.is_subset(&node))
    }

    fn describe(&self) -> Option<Kubelet> {
        let status = fs::read_to_string(self.path.join("status")).ok()?;
        Some(Kubelet {
            pid: self.pid,
            start_time: start_time(&self.path)?,
            user: user(&status)?,
        })
    }
}

fn start_time(process: &Path) -> Option<u64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    parse_stat(&stat).map(|(start_time, _)| start_time)
}

/// Returns the filesystem uid, last of four (proc_pid_status(5)): new sockets belong to it.
fn user(status: &str) -> Option<u32> {
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    ids.split_ascii_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const POD: &str = "0::/kubepods/burstable/pod11111111-2222-3333-4444-555555555555/x\n";
    const UNIT: &str = "0::/system.slice/kubelet.service\n";

    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Self {
            let proc = Self(tempfile::tempdir().unwrap());
            proc.add(1, "systemd", "/sbin/init", "0::/init.scope\n", &[]);
            proc
        }

        fn add(&self, pid: u32, command: &str, arguments: &str, cgroup: &str, sockets: &[u32]) {
            let path = self.0.path().join(pid.to_string());
            fs::create_dir_all(path.join("fd")).unwrap();
            let write = |name: &str, text: &str| fs::write(path.join(name), text).unwrap();
            write("comm", &format!("{command}\n"));
            write("cmdline", &arguments.replace(' ', "\0"));
            write("cgroup", cgroup);
            write(
                "status",
                &format!("Name:\t{command}\nUid:\t0\t0\t0\t{}\n", pid * 10),
            );
            let after = "0 ".repeat(18);
            write("stat", &format!("{pid} ({command}) S {after} 4711 0"));
            for (number, socket) in sockets.iter().enumerate() {
                let target = format!("socket:[{socket}]");
                symlink(target, path.join("fd").join(number.to_string())).unwrap();
            }
        }

        fn found(&self, listening: &[u32]) -> Option<(u32, u32)> {
            let listening = listening.iter().copied().collect();
            search(self.0.path(), &listening).map(|found| (found.pid, found.user))
        }
    }

    #[test]
    fn who_listens_on_the_port_is_the_kubelet_whatever_it_is_called() {
        let proc = Proc::new();
        proc.add(20, "hyperkube", "/hyperkube", UNIT, &[7, 8]);
        proc.add(
            30,
            "sshd",
            "/usr/sbin/sshd",
            "0::/system.slice/ssh.service\n",
            &[9],
        );
        assert_eq!(proc.found(&[8]), Some((20, 200)));
        assert_eq!(proc.found(&[]), None);
    }

    #[test]
    fn one_that_is_called_so_and_does_not_listen_there_gives_way_to_one_that_does() {
        let proc = Proc::new();
        proc.add(20, "kubelet", "/usr/bin/kubelet", UNIT, &[]);
        proc.add(30, "k3s-server", "/usr/local/bin/k3s server", UNIT, &[8]);
        assert_eq!(proc.found(&[8]), Some((30, 300)));
        assert_eq!(proc.found(&[]), Some((20, 200)));
    }

    #[test]
    fn a_process_in_a_container_is_no_kubelet() {
        let proc = Proc::new();
        proc.add(20, "kubelet", "/usr/bin/kubelet", POD, &[8]);
        assert_eq!(proc.found(&[8]), None);
        assert_eq!(proc.found(&[]), None);
    }

    #[test]
    fn a_kubelet_of_a_node_that_is_a_container_itself_is_one() {
        let proc = Proc::new();
        let id = "a".repeat(64);
        proc.add(
            1,
            "systemd",
            "/sbin/init",
            &format!("0::/docker/{id}/init.scope\n"),
            &[],
        );
        let unit = format!("0::/docker/{id}/kubelet.slice/kubelet.service\n");
        proc.add(20, "kubelet", "/usr/bin/kubelet", &unit, &[8]);
        assert_eq!(proc.found(&[8]), Some((20, 200)));
    }

    #[test]
    fn the_name_alone_is_not_enough_but_for_k3s() {
        let proc = Proc::new();
        proc.add(20, "kubelite", "/bin/sleep 60", UNIT, &[]);
        assert_eq!(proc.found(&[]), None);
        proc.add(
            20,
            "kubelite",
            "/snap/microk8s/kubelite --kubelet-args-file=x",
            UNIT,
            &[],
        );
        assert_eq!(proc.found(&[]), Some((20, 200)));
        let proc = Proc::new();
        proc.add(20, "k3s", "/usr/local/bin/k3s agent", UNIT, &[]);
        assert_eq!(proc.found(&[]), Some((20, 200)));
    }
}
