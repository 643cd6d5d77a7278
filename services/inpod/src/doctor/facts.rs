//! The collected facts, without judgment. A fact that could not be read holds the reason instead.

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
    /// The release of the kernel, from uname(2).
    pub(crate) release: Observed<String>,
    pub(crate) features: BTreeMap<&'static str, Presence>,
    /// The mounts in the namespace of the node's first process.
    pub(crate) mounts: Observed<Vec<Mount>>,
    /// The mounts in the mount namespace of netconfig.
    pub(crate) netconfig_mounts: Observed<Vec<Mount>>,
    /// False if SELinux is permissive, and on nodes without SELinux.
    pub(crate) selinux_enforcing: Observed<bool>,
    pub(crate) apparmor: Observed<bool>,
    pub(crate) runtimes: Vec<String>,
    pub(crate) chain: Chain,
    pub(crate) plugin: Plugin,
    /// The services in the order of `SERVICES`, then the deployed optional services.
    pub(crate) services: Vec<Service>,
    pub(crate) status: Observed<GetStatusResponse>,
    pub(crate) pods: Observed<Vec<PodSummary>>,
    pub(crate) workloads: Observed<ListWorkloadsResponse>,
    pub(crate) zds: Zds,
    /// The states of the claimed network namespaces; netconfig reports no others.
    pub(crate) states: Observed<Vec<NetnsState>>,
    pub(crate) findings: Observed<Findings>,
    /// The contents of the files by path below `/proc/sys`.
    pub(crate) sysctls: BTreeMap<&'static str, Observed<String>>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) kill_switch: Observed<bool>,
    pub(crate) spool: Observed<usize>,
    /// `None` if the caller did not request a self-test.
    pub(crate) self_test: Option<Observed<SelfTestResponse>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The feature is built in or loaded; holds the evidence.
    There(&'static str),
    /// The kernel loads the module on demand; holds the module's file.
    Loadable(String),
    /// The feature is neither built in nor available as a module.
    Absent,
    /// The sources could not be read; holds the reason.
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// The permission bits, without the file type.
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
    /// The reported readiness, or the reason why the service reported none.
    pub(crate) ready: Observed<bool>,
    /// The service answered, but rejects this process as a caller.
    pub(crate) refuses: bool,
    pub(crate) version: Observed<String>,
    /// The conditions in the service's metrics; the status of pod-events also has messages.
    pub(crate) conditions: BTreeMap<String, bool>,
    pub(crate) process: Observed<Process>,
}

#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// The security label, from `/proc/<pid>/attr/current`.
    pub(crate) label: Observed<String>,
    pub(crate) open_files: Observed<u64>,
    pub(crate) file_limit: Observed<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Zds {
    pub(crate) path: String,
    pub(crate) socket: Observed<Option<Inode>>,
    /// The processes listening on the socket, by pid and command.
    pub(crate) holders: Observed<Vec<(i32, String)>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// The number of inspected network namespaces.
    pub(crate) inspected: usize,
    /// Each finding with the container id of its sandbox.
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
    /// The free inodes; zero, like `all_files`, if the file system does not count inodes.
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
