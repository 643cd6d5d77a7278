//! The facts about a node, without any judgment. A fact that could not be read has the reason instead.

use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::{Finding, NetnsState, SelfTestResponse},
    podevents::v1::{GetStatusResponse, PodSummary},
    ztunnelbroker::v1::ListWorkloadsResponse,
};

use super::{chain::Chain, mounts::Mount};
use crate::host_fs::Observed;

/// The input of all checks.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The release as in uname(2).
    pub(crate) release: Observed<String>,
    /// Kernel features by name.
    pub(crate) features: BTreeMap<&'static str, Presence>,
    /// The mounts of the node's first process.
    pub(crate) mounts: Observed<Vec<Mount>>,
    /// The mounts that netconfig sees.
    pub(crate) netconfig_mounts: Observed<Vec<Mount>>,
    /// False if SELinux is not present.
    pub(crate) selinux_enforcing: Observed<bool>,
    pub(crate) apparmor: Observed<bool>,
    /// Sockets of container runtimes.
    pub(crate) runtimes: Vec<String>,
    pub(crate) chain: Chain,
    pub(crate) plugin: Plugin,
    /// In the order of their dependencies.
    pub(crate) services: Vec<Service>,
    pub(crate) status: Observed<GetStatusResponse>,
    pub(crate) pods: Observed<Vec<PodSummary>>,
    pub(crate) workloads: Observed<ListWorkloadsResponse>,
    pub(crate) zds: Zds,
    /// The states of the claimed network namespaces.
    pub(crate) states: Observed<Vec<NetnsState>>,
    pub(crate) findings: Observed<Findings>,
    /// Files below `/proc/sys`, by their path there.
    pub(crate) sysctls: BTreeMap<&'static str, Observed<String>>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) kill_switch: Observed<bool>,
    /// The number of spooled calls.
    pub(crate) spool: Observed<usize>,
    /// `None` if it was not requested.
    pub(crate) self_test: Option<Observed<SelfTestResponse>>,
}

/// The availability of a kernel feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Built in or loaded, with the evidence.
    There(&'static str),
    /// A module that the kernel loads on demand.
    Loadable(String),
    /// Neither built in nor available as a module.
    Absent,
    /// It cannot be found out.
    Unknown(String),
}

/// A file's metadata as in stat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// The permission bits of the mode.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) kind: Kind,
}

/// The type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    Socket,
    File,
    Other,
}

/// The binary of the CNI plugin.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    pub(crate) path: String,
    pub(crate) binary: Observed<Option<Inode>>,
    /// The answer to VERSION.
    pub(crate) answer: Observed<String>,
}

/// A service of the agent.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: &'static str,
    /// The metadata of its directory.
    pub(crate) directory: Observed<Option<Inode>>,
    pub(crate) socket: Observed<Option<Inode>>,
    /// The readiness that it reports, or the reason why it did not answer.
    pub(crate) ready: Observed<bool>,
    /// True if it rejected this process as a caller.
    pub(crate) refuses: bool,
    pub(crate) version: Observed<String>,
    /// From its metrics; the status of pod-events has more details.
    pub(crate) conditions: BTreeMap<String, bool>,
    pub(crate) process: Observed<Process>,
}

/// The process of a service.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// The content of `/proc/<pid>/attr/current`.
    pub(crate) label: Observed<String>,
    pub(crate) open_files: Observed<u64>,
    pub(crate) file_limit: Observed<u64>,
}

/// The socket that ztunnel connects to.
#[derive(Clone, Debug)]
pub(crate) struct Zds {
    pub(crate) path: String,
    pub(crate) socket: Observed<Option<Inode>>,
    /// The pid and command of each listening process.
    pub(crate) holders: Observed<Vec<(i32, String)>>,
}

/// The findings of netconfig.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// The number of inspected network namespaces.
    pub(crate) inspected: usize,
    /// Each finding with its container.
    pub(crate) of: Vec<(String, Finding)>,
}

/// A directory with state of inpod.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub(crate) path: String,
    pub(crate) inode: Observed<Option<Inode>>,
    pub(crate) space: Observed<Space>,
}

/// The free space of a file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub(crate) bytes: u64,
    /// Free inodes; both numbers are zero if the file system does not count them.
    pub(crate) files: u64,
    pub(crate) all_files: u64,
    pub(crate) is_read_only: bool,
}

impl Facts {
    /// Returns a service by its name.
    pub(crate) fn service(&self, name: &str) -> Option<&Service> {
        self.services.iter().find(|service| service.name == name)
    }

    /// Parses a sysctl as a number.
    pub(crate) fn number(&self, sysctl: &str) -> Observed<u64> {
        let text = self.sysctls.get(sysctl).cloned();
        let text = text.unwrap_or_else(|| Err(format!("{sysctl} was not read")))?;
        let number = text.split_whitespace().next().unwrap_or_default().parse();
        number.map_err(|_| format!("{sysctl} is not a number: {text:?}"))
    }
}
