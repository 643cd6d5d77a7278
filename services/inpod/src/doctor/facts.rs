//! Facts without judgment. An unreadable fact has the reason instead.

use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::{Finding, NetnsState, SelfTestResponse},
    podevents::v1::{GetStatusResponse, PodSummary},
    ztunnelbroker::v1::ListWorkloadsResponse,
};

use super::{chain::Chain, mounts::Mount};
use crate::host_fs::Observed;

#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The release of uname(2).
    pub(crate) release: Observed<String>,
    pub(crate) features: BTreeMap<&'static str, Presence>,
    /// The node's first process's mounts.
    pub(crate) mounts: Observed<Vec<Mount>>,
    /// The mounts that netconfig sees.
    pub(crate) netconfig_mounts: Observed<Vec<Mount>>,
    /// False without SELinux, too.
    pub(crate) selinux_enforcing: Observed<bool>,
    pub(crate) apparmor: Observed<bool>,
    pub(crate) runtimes: Vec<String>,
    pub(crate) chain: Chain,
    pub(crate) plugin: Plugin,
    /// The dependencies come first.
    pub(crate) services: Vec<Service>,
    pub(crate) status: Observed<GetStatusResponse>,
    pub(crate) pods: Observed<Vec<PodSummary>>,
    pub(crate) workloads: Observed<ListWorkloadsResponse>,
    pub(crate) zds: Zds,
    /// For claimed network namespaces only.
    pub(crate) states: Observed<Vec<NetnsState>>,
    pub(crate) findings: Observed<Findings>,
    /// Keyed by path below `/proc/sys`.
    pub(crate) sysctls: BTreeMap<&'static str, Observed<String>>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) kill_switch: Observed<bool>,
    pub(crate) spool: Observed<usize>,
    /// `None` if not requested.
    pub(crate) self_test: Option<Observed<SelfTestResponse>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Built in or loaded, with evidence.
    There(&'static str),
    /// The kernel loads it on demand.
    Loadable(String),
    /// Neither built in nor a module.
    Absent,
    /// Could not be found out.
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// The permission bits only.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    Socket,
    File,
    Other,
}

#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    pub(crate) path: String,
    pub(crate) binary: Observed<Option<Inode>>,
    pub(crate) answer: Observed<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: &'static str,
    pub(crate) directory: Observed<Option<Inode>>,
    pub(crate) socket: Observed<Option<Inode>>,
    /// The reported readiness, or the reason for none.
    pub(crate) ready: Observed<bool>,
    /// Rejects this process as a caller.
    pub(crate) refuses: bool,
    pub(crate) version: Observed<String>,
    /// Read from metrics; the status of pod-events has more.
    pub(crate) conditions: BTreeMap<String, bool>,
    pub(crate) process: Observed<Process>,
}

#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// The content of `/proc/<pid>/attr/current`.
    pub(crate) label: Observed<String>,
    pub(crate) open_files: Observed<u64>,
    pub(crate) file_limit: Observed<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Zds {
    pub(crate) path: String,
    pub(crate) socket: Observed<Option<Inode>>,
    /// Listening processes: pid and command.
    pub(crate) holders: Observed<Vec<(i32, String)>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// Counts inspected network namespaces.
    pub(crate) inspected: usize,
    /// Findings with their containers.
    pub(crate) of: Vec<(String, Finding)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub(crate) path: String,
    pub(crate) inode: Observed<Option<Inode>>,
    pub(crate) space: Observed<Space>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub(crate) bytes: u64,
    /// Both numbers are zero if the file system does not count inodes.
    pub(crate) files: u64,
    pub(crate) all_files: u64,
    pub(crate) is_read_only: bool,
}

impl Facts {
    pub(crate) fn service(&self, name: &str) -> Option<&Service> {
        self.services.iter().find(|service| service.name == name)
    }

    pub(crate) fn number(&self, sysctl: &str) -> Observed<u64> {
        let text = self.sysctls.get(sysctl).cloned();
        let text = text.unwrap_or_else(|| Err(format!("{sysctl} was not read")))?;
        let number = text.split_whitespace().next().unwrap_or_default().parse();
        number.map_err(|_| format!("{sysctl} is not a number: {text:?}"))
    }
}
