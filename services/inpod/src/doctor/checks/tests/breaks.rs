//! Faults for the tests of doctor: one for every code.

use inpod_proto::{
    netconfig::v1::{Finding, FindingKind, SelfTestCheck},
    types::v1::{Failure, Reason},
    ztunnelbroker::v1::{SessionPhase, WorkloadPhase},
};

use super::super::{
    super::{
        codes::Code,
        facts::{Presence, Space},
    },
    fixture::{inode, network, networks, service},
    *,
};

pub(super) type Break = fn(&mut Facts);

pub(super) fn set(facts: &mut Facts, sysctl: &'static str, value: &str) {
    facts.sysctls.insert(sysctl, Ok(value.to_owned()));
}

fn space(facts: &mut Facts) -> &mut Space {
    facts.directories[0].space.as_mut().unwrap()
}

pub(super) fn condition(facts: &mut Facts, name: &str) {
    let status = facts.status.as_mut().unwrap();
    let found = status
        .conditions
        .iter_mut()
        .find(|it| it.name == name)
        .unwrap();
    found.ok = false;
    found.message = "it is away".to_owned();
}

/// Lists each fault with the only code that doctor must report for this fault.
pub(super) const BREAKS: &[(Code, Break)] = &[
    (Code::KernelTooOld, |it| {
        it.release = Ok("5.13.19-generic".to_owned());
    }),
    (Code::KernelFeatureMissing, |it| {
        drop(it.features.insert("nf_tables", Presence::Absent));
    }),
    (Code::KernelOptionMissing, |it| {
        drop(it.features.insert("nft tproxy", Presence::Absent));
    }),
    (Code::NetnsNotShared, |it| {
        it.mounts.as_mut().unwrap()[1].is_shared = false;
    }),
    (Code::NetnsNotSeen, |it| {
        drop(it.netconfig_mounts.as_mut().unwrap().pop());
    }),
    (Code::LsmSelinuxConfined, |it| {
        it.selinux_enforcing = Ok(true);
        it.apparmor = Ok(false);
        let process = service(it, "netconfig").process.as_mut().unwrap();
        process.label = Ok("system_u:system_r:container_t:s0:c1,c2".to_owned());
    }),
    (Code::LsmApparmorConfined, |it| {
        let process = service(it, "netconfig").process.as_mut().unwrap();
        process.label = Ok("cri-containerd.apparmor.d (enforce)".to_owned());
    }),
    (Code::RuntimeMissing, |it| it.runtimes.clear()),
    (Code::CniDirectoryMissing, |it| it.chain.networks = Ok(None)),
    (Code::ChainMissing, |it| networks(it).clear()),
    (Code::ChainFileInvalid, |it| {
        let mut invalid = network("01-broken.conflist", &[]);
        invalid.plugins = Err("it lists no plugins".to_owned());
        networks(it).insert(0, invalid);
    }),
    (Code::ChainWithoutInpod, |it| drop(networks(it).remove(0))),
    (Code::ChainShadowed, |it| {
        networks(it).insert(0, network("00-other.conflist", &["ptp"]));
    }),
    (Code::ChainSecondAgent, |it| {
        networks(it)[0]
            .plugins
            .as_mut()
            .unwrap()
            .push("istio-cni".to_owned());
    }),
    (Code::ChainTwice, |it| {
        networks(it)[0]
            .plugins
            .as_mut()
            .unwrap()
            .push("inpod-cni".to_owned());
    }),
    (Code::ChainExclusive, |it| {
        it.chain
            .renamed
            .push("10-primary.conflist.cilium_bak".to_owned());
    }),
    (Code::PluginMissing, |it| it.plugin.binary = Ok(None)),
    (Code::PluginNotExecutable, |it| {
        it.plugin.binary = Ok(Some(inode(Kind::File, 0o644)));
    }),
    (Code::PluginSilent, |it| {
        it.plugin.answer = Err("no answer within 5 s".to_owned());
    }),
    (Code::KillSwitch, |it| it.kill_switch = Ok(true)),
    (Code::SocketMissing, |it| {
        service(it, "netconfig").socket = Ok(None);
    }),
    (Code::SocketOpen, |it| {
        service(it, "netconfig").socket = Ok(Some(inode(Kind::Socket, 0o666)));
    }),
    (Code::ServiceSilent, |it| {
        service(it, "netconfig").ready = Err("connection refused".to_owned());
    }),
    (Code::ServiceNotReady, |it| {
        service(it, "netconfig").ready = Ok(false);
    }),
    (Code::ConditionBad, |it| condition(it, "pods")),
    (Code::AddsRefused, |it| {
        let conditions = &mut service(it, "netconfig").conditions;
        conditions.insert("apply".to_owned(), false);
    }),
    (Code::VersionsDiffer, |it| {
        service(it, "installer").version = Ok("1.1.0".to_owned());
    }),
    (Code::VersionsTooFar, |it| {
        service(it, "installer").version = Ok("1.0.9".to_owned());
    }),
    (Code::InstallerAbsent, |it| {
        service(it, "installer").directory = Ok(None);
        service(it, "installer").socket = Ok(None);
    }),
    (Code::ZdsSocketMissing, |it| it.zds.socket = Ok(None)),
    (Code::ZdsSocketForeign, |it| {
        it.zds.holders = Ok(vec![(4711, "install-cni".to_owned())]);
    }),
    (Code::ZtunnelAbsent, |it| {
        it.workloads.as_mut().unwrap().sessions.clear();
    }),
    (Code::ZtunnelBehind, |it| {
        it.workloads.as_mut().unwrap().sessions[0].phase = SessionPhase::Snapshot.into();
    }),
    (Code::BrokerNotSeeded, |it| {
        it.workloads.as_mut().unwrap().seeded = false;
    }),
    (Code::WorkloadsRefused, |it| {
        it.workloads.as_mut().unwrap().workloads[0].states[0].phase = WorkloadPhase::Refused.into();
    }),
    (Code::PodsUnhealthy, |it| {
        it.pods.as_mut().unwrap()[0].last_failure = Some(Failure {
            reason: Reason::ZtunnelRefused.into(),
            ..Failure::default()
        });
    }),
    (Code::PodsAdmittedUnenrolled, |it| {
        it.pods.as_mut().unwrap()[0].let_through = true;
    }),
    (Code::RulesDrifted, |it| {
        it.states.as_mut().unwrap()[0].intact = false;
    }),
    (Code::PodFindings, |it| {
        let finding = Finding {
            kind: FindingKind::RpFilter.into(),
            ..Finding::default()
        };
        it.findings
            .as_mut()
            .unwrap()
            .of
            .push(("c1".to_owned(), finding));
    }),
    (Code::Ipv6Disabled, |it| {
        set(it, "net/ipv6/conf/default/disable_ipv6", "1");
    }),
    (Code::RpFilterStrict, |it| {
        set(it, "net/ipv4/conf/all/rp_filter", "1");
    }),
    (Code::ConntrackNearFull, |it| {
        set(it, "net/netfilter/nf_conntrack_count", "209716");
    }),
    (Code::InotifyLow, |it| {
        set(it, "fs/inotify/max_user_instances", "127");
    }),
    (Code::FilesNearLimit, |it| {
        service(it, "netconfig")
            .process
            .as_mut()
            .unwrap()
            .open_files = Ok(820);
    }),
    (Code::StateReadOnly, |it| space(it).is_read_only = true),
    (Code::StateSpaceLow, |it| space(it).bytes = (16 << 20) - 1),
    (Code::StateOpen, |it| {
        it.directories[0].inode = Ok(Some(inode(Kind::Directory, 0o755)));
    }),
    (Code::SpoolWaiting, |it| it.spool = Ok(1)),
    (Code::SpoolFull, |it| it.spool = Ok(state::MAX_SPOOLED)),
    (Code::SelfTestFailed, |it| {
        let test = it.self_test.as_mut().unwrap().as_mut().unwrap();
        test.passed = false;
        test.checks.push(SelfTestCheck::default());
    }),
];
