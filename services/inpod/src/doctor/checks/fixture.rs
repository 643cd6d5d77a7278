//! Builds the facts of a healthy node, which each test changes in one place.

use std::collections::BTreeMap;

use inpod_proto::{
    netconfig::v1::{NetnsState, SelfTestResponse},
    podevents::v1::{Condition, GetStatusResponse, PodSummary},
    types::v1::SandboxRef,
    ztunnelbroker::v1::{
        ListWorkloadsResponse, Session, SessionPhase, WorkloadState, WorkloadStatus,
    },
};

use super::super::{
    chain::{Chain, Network},
    collect::{FEATURES, SERVICES},
    facts::{
        Directory, Facts, Findings, Inode, Kind, Plugin, Presence, Process, Service, Space, Zds,
    },
    mounts,
};

const MOUNTS: &str = "\
22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw
24 22 0:22 / /run rw shared:2 - tmpfs tmpfs rw
31 24 0:4 net:[4026532200] /run/netns/cni-1 rw shared:3 - nsfs nsfs rw
";

pub(super) fn inode(kind: Kind, mode: u32) -> Inode {
    Inode { mode, uid: 0, kind }
}

pub(super) fn network(file: &str, plugins: &[&str]) -> Network {
    Network {
        file: file.to_owned(),
        plugins: Ok(plugins.iter().map(|it| (*it).to_owned()).collect()),
    }
}

pub(super) fn networks(facts: &mut Facts) -> &mut Vec<Network> {
    facts.chain.networks.as_mut().unwrap().as_mut().unwrap()
}

pub(super) fn service<'a>(facts: &'a mut Facts, name: &str) -> &'a mut Service {
    facts
        .services
        .iter_mut()
        .find(|it| it.name == name)
        .unwrap()
}

pub(super) fn state(container: &str, intact: bool) -> NetnsState {
    NetnsState {
        sandbox: Some(SandboxRef {
            container_id: container.to_owned(),
            ..SandboxRef::default()
        }),
        fingerprint: "f".to_owned(),
        intact,
        ..NetnsState::default()
    }
}

pub(super) fn healthy_service(pid: i32, name: &'static str) -> Service {
    Service {
        name,
        directory: Ok(Some(inode(Kind::Directory, 0o700))),
        socket: Ok(Some(inode(Kind::Socket, 0o600))),
        ready: Ok(true),
        refuses: false,
        version: Ok("1.2.3".to_owned()),
        conditions: ["apply", "probe-set"]
            .map(|name| (name.to_owned(), true))
            .into(),
        process: Ok(Process {
            pid,
            label: Ok("unconfined".to_owned()),
            open_files: Ok(20),
            file_limit: Ok(1024),
        }),
    }
}

fn status() -> GetStatusResponse {
    let names = ["netconfig", "ztunnel-broker", "ztunnel", "in-step", "pods"];
    let condition = |name: &str| Condition {
        name: name.to_owned(),
        ok: true,
        ..Condition::default()
    };
    GetStatusResponse {
        ready: true,
        conditions: names.map(condition).into(),
        ..GetStatusResponse::default()
    }
}

fn workloads() -> ListWorkloadsResponse {
    ListWorkloadsResponse {
        seeded: true,
        sessions: vec![Session {
            phase: SessionPhase::Live.into(),
            ..Session::default()
        }],
        workloads: vec![WorkloadStatus {
            states: vec![WorkloadState::default()],
            ..WorkloadStatus::default()
        }],
        ..ListWorkloadsResponse::default()
    }
}

fn sysctls() -> BTreeMap<&'static str, Result<String, String>> {
    let values = [
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/conf/default/rp_filter", "2"),
        ("net/ipv6/conf/all/disable_ipv6", "0"),
        ("net/ipv6/conf/default/disable_ipv6", "0"),
        ("net/netfilter/nf_conntrack_count", "100"),
        ("net/netfilter/nf_conntrack_max", "262144"),
        ("fs/inotify/max_user_instances", "128"),
        ("fs/inotify/max_user_watches", "8192"),
        ("fs/file-nr", "1000\t0\t9223372036854775807"),
        ("fs/file-max", "9223372036854775807"),
    ];
    values
        .map(|(name, value)| (name, Ok(value.to_owned())))
        .into()
}

fn directory() -> Directory {
    Directory {
        path: "/run/inpod/pod-events".to_owned(),
        inode: Ok(Some(inode(Kind::Directory, 0o700))),
        space: Ok(Space {
            bytes: 1 << 30,
            files: 1 << 20,
            all_files: 1 << 21,
            is_read_only: false,
        }),
    }
}

pub(super) fn healthy() -> Facts {
    let features = FEATURES
        .iter()
        .map(|it| (it.name, Presence::There("built in")));
    Facts {
        release: Ok("5.14.0-362.el9\n".to_owned()),
        features: features.collect(),
        mounts: Ok(mounts::parse(MOUNTS)),
        netconfig_mounts: Ok(mounts::parse(MOUNTS)),
        selinux_enforcing: Ok(false),
        apparmor: Ok(true),
        runtimes: vec!["/run/containerd/containerd.sock".to_owned()],
        chain: Chain {
            directory: "/etc/cni/net.d".to_owned(),
            plugins: "/opt/cni/bin".to_owned(),
            source: "as given".to_owned(),
            networks: Ok(Some(vec![
                network("02-inpod.conflist", &["bridge", "portmap", "inpod-cni"]),
                network("10-primary.conflist", &["bridge", "portmap"]),
            ])),
            renamed: Vec::new(),
        },
        plugin: Plugin {
            path: "/opt/cni/bin/inpod-cni".to_owned(),
            binary: Ok(Some(inode(Kind::File, 0o755))),
            answer: Ok(r#"{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}"#.to_owned()),
        },
        services: (10..)
            .zip(SERVICES)
            .map(|(pid, name)| healthy_service(pid, name))
            .collect(),
        status: Ok(status()),
        pods: Ok(vec![PodSummary::default()]),
        workloads: Ok(workloads()),
        zds: Zds {
            path: "/var/run/ztunnel/ztunnel.sock".to_owned(),
            socket: Ok(Some(inode(Kind::Socket, 0o600))),
            holders: Ok(vec![(11, "ztunnel-broker".to_owned())]),
        },
        states: Ok(vec![state("c1", true), NetnsState::default()]),
        findings: Ok(Findings::default()),
        sysctls: sysctls(),
        directories: vec![directory()],
        kill_switch: Ok(false),
        spool: Ok(0),
        self_test: Some(Ok(SelfTestResponse {
            passed: true,
            ..SelfTestResponse::default()
        })),
    }
}
