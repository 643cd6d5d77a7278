//! What is known of a node before anything is judged. Nothing here was decided; what could not be looked at says why.

use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::{Finding, NetnsState, SelfTestResponse},
    podevents::v1::{GetStatusResponse, PodSummary},
    ztunnelbroker::v1::ListWorkloadsResponse,
};

use super::{chain::Chain, mounts::Mount};
use crate::root::Seen;

/// Everything that checks look at.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// As uname(2) tells it.
    pub(crate) release: Seen<String>,
    /// Parts of the kernel, by name.
    pub(crate) features: BTreeMap<&'static str, Presence>,
    /// The mounts of the node's first process.
    pub(crate) mounts: Seen<Vec<Mount>>,
    /// Those of netconfig.
    pub(crate) netconfig_mounts: Seen<Vec<Mount>>,
    /// Whether SELinux is enforcing; false also where it is not there.
    pub(crate) selinux_enforcing: Seen<bool>,
    /// Whether AppArmor is on.
    pub(crate) apparmor: Seen<bool>,
    /// The sockets of runtimes that are there.
    pub(crate) runtimes: Vec<String>,
    pub(crate) chain: Chain,
    pub(crate) plugin: Plugin,
    /// In the order of their dependence.
    pub(crate) services: Vec<Service>,
    pub(crate) status: Seen<GetStatusResponse>,
    pub(crate) pods: Seen<Vec<PodSummary>>,
    pub(crate) workloads: Seen<ListWorkloadsResponse>,
    pub(crate) zds: Zds,
    /// What is in the claimed netns.
    pub(crate) states: Seen<Vec<NetnsState>>,
    pub(crate) findings: Seen<Findings>,
    /// Files below `/proc/sys`, by their path there.
    pub(crate) sysctls: BTreeMap<&'static str, Seen<String>>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) kill_switch: Seen<bool>,
    /// How many calls of the plugin wait.
    pub(crate) spool: Seen<usize>,
    /// `None`: not asked for.
    pub(crate) self_test: Option<Seen<SelfTestResponse>>,
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
    pub(crate) binary: Seen<Option<Inode>>,
    /// What it answered to VERSION.
    pub(crate) answer: Seen<String>,
}

/// A service of the node.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: &'static str,
    /// Whose directory, and what it is.
    pub(crate) directory: Seen<Option<Inode>>,
    pub(crate) socket: Seen<Option<Inode>>,
    /// Whether it says that it is ready; why it did not answer.
    pub(crate) ready: Seen<bool>,
    /// Whether it answered that it takes no call from this process.
    pub(crate) refuses: bool,
    pub(crate) version: Seen<String>,
    /// From its metrics: those of pod-events say more in its status.
    pub(crate) conditions: BTreeMap<String, bool>,
    pub(crate) process: Seen<Process>,
}

/// A service's process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// `/proc/<pid>/attr/current`.
    pub(crate) label: Seen<String>,
    pub(crate) open_files: Seen<u64>,
    pub(crate) file_limit: Seen<u64>,
}

/// The socket on which ztunnels connect.
#[derive(Clone, Debug)]
pub(crate) struct Zds {
    pub(crate) path: String,
    pub(crate) socket: Seen<Option<Inode>>,
    /// Who has it open for listening: pid and command.
    pub(crate) holders: Seen<Vec<(i32, String)>>,
}

/// What netconfig found in the way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// In how many netns it was looked.
    pub(crate) looked_at: usize,
    /// Container and finding.
    pub(crate) of: Vec<(String, Finding)>,
}

/// A directory of state.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub(crate) path: String,
    pub(crate) inode: Seen<Option<Inode>>,
    pub(crate) space: Seen<Space>,
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
    pub(crate) fn number(&self, sysctl: &str) -> Seen<u64> {
        let text = self.sysctls.get(sysctl).cloned();
        let text = text.unwrap_or_else(|| Err(format!("{sysctl} was not read")))?;
        let number = text.split_whitespace().next().unwrap_or_default().parse();
        number.map_err(|_| format!("{sysctl} is {text:?}, which is no number"))
    }
}
