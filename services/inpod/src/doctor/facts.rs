//! What is known of a node before anything is judged. Nothing here was decided; what could not be looked at says why.

use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::{Finding, NetnsState, SelfTestResponse},
    podevents::v1::{GetStatusResponse, PodSummary},
    ztunnelbroker::v1::ListWorkloadsResponse,
};

use super::{chain::Chain, mounts::Mount};
use crate::host_fs::Observed;

/// Everything that checks look at.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// As uname(2) tells it.
    pub(crate) release: Observed<String>,
    /// Parts of the kernel, by name.
    pub(crate) features: BTreeMap<&'static str, Presence>,
    /// The mounts of the node's first process.
    pub(crate) mounts: Observed<Vec<Mount>>,
    /// Those of netconfig.
    pub(crate) netconfig_mounts: Observed<Vec<Mount>>,
    /// Whether SELinux is enforcing; false also where it is not there.
    pub(crate) selinux_enforcing: Observed<bool>,
    /// Whether AppArmor is on.
    pub(crate) apparmor: Observed<bool>,
    /// The sockets of runtimes that are there.
    pub(crate) runtimes: Vec<String>,
    pub(crate) chain: Chain,
    pub(crate) plugin: Plugin,
    /// In the order of their dependence.
    pub(crate) services: Vec<Service>,
    pub(crate) status: Observed<GetStatusResponse>,
    pub(crate) pods: Observed<Vec<PodSummary>>,
    pub(crate) workloads: Observed<ListWorkloadsResponse>,
    pub(crate) zds: Zds,
    /// What is in the claimed netns.
    pub(crate) states: Observed<Vec<NetnsState>>,
    pub(crate) findings: Observed<Findings>,
    /// Files below `/proc/sys`, by their path there.
    pub(crate) sysctls: BTreeMap<&'static str, Observed<String>>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) kill_switch: Observed<bool>,
    /// How many calls of the plugin wait.
    pub(crate) spool: Observed<usize>,
    /// `None`: not asked for.
    pub(crate) self_test: Option<Observed<SelfTestResponse>>,
}

/// Whether a part of the kernel is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Built in, or loaded; how that is known.
    There(&'static str),
    /// A module that the kernel loads when it is needed.
    Loadable(String),
    /// It is neither.
    Absent,
    /// Nothing tells.
    Unknown(String),
}

/// A file, as stat(2) tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) kind: Kind,
}

/// What kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    Socket,
    File,
    Other,
}

/// The plugin's binary.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    pub(crate) path: String,
    pub(crate) binary: Observed<Option<Inode>>,
    /// What it answered to VERSION.
    pub(crate) answer: Observed<String>,
}

/// A service of the node.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: &'static str,
    /// Whose directory, and what it is.
    pub(crate) directory: Observed<Option<Inode>>,
    pub(crate) socket: Observed<Option<Inode>>,
    /// Whether it says that it is ready; why it did not answer.
    pub(crate) ready: Observed<bool>,
    /// Whether it answered that it takes no call from this process.
    pub(crate) refuses: bool,
    pub(crate) version: Observed<String>,
    /// From its metrics: those of pod-events say more in its status.
    pub(crate) conditions: BTreeMap<String, bool>,
    pub(crate) process: Observed<Process>,
}

/// A service's process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// `/proc/<pid>/attr/current`.
    pub(crate) label: Observed<String>,
    pub(crate) open_files: Observed<u64>,
    pub(crate) file_limit: Observed<u64>,
}

/// The socket on which ztunnels connect.
#[derive(Clone, Debug)]
pub(crate) struct Zds {
    pub(crate) path: String,
    pub(crate) socket: Observed<Option<Inode>>,
    /// Who has it open for listening: pid and command.
    pub(crate) holders: Observed<Vec<(i32, String)>>,
}

/// What netconfig found in the way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// In how many netns it was looked.
    pub(crate) inspected: usize,
    /// Container and finding.
    pub(crate) of: Vec<(String, Finding)>,
}

/// A directory of state.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub(crate) path: String,
    pub(crate) inode: Observed<Option<Inode>>,
    pub(crate) space: Observed<Space>,
}

/// What is left on a file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub(crate) bytes: u64,
    /// Of files; zero of both where the file system does not count them.
    pub(crate) files: u64,
    pub(crate) all_files: u64,
    pub(crate) is_read_only: bool,
}

impl Facts {
    /// A service by its name.
    pub(crate) fn service(&self, name: &str) -> Option<&Service> {
        self.services.iter().find(|service| service.name == name)
    }

    /// A sysctl as a number.
    pub(crate) fn number(&self, sysctl: &str) -> Observed<u64> {
        let text = self.sysctls.get(sysctl).cloned();
        let text = text.unwrap_or_else(|| Err(format!("{sysctl} was not read")))?;
        let number = text.split_whitespace().next().unwrap_or_default().parse();
        number.map_err(|_| format!("{sysctl} is not a number: {text:?}"))
    }
}
