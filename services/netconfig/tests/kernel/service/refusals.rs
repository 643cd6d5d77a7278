//! Refused requests change nothing, neither in the pod's netns nor in netconfig's.

use std::{fs::File, path::PathBuf, process::Command};

use inpod_proto::{
    failure_of,
    netconfig::v1::{
        AmbientRedirection, ApplyRulesRequest, Exclusions, InspectNetnsRequest, PlanRulesRequest,
        Redirection, RemovePhase, RemoveRulesRequest, VerifyRulesRequest,
        inspect_netns_request::Target, redirection::Mode,
    },
    types::v1::NetnsRef,
};
use inpod_types::Reason;
use tonic::{Code, Status};

use crate::harness::{Netconfig, ambient, at, is_closed, netns_ref, pod_netns, refusal, wire};
use crate::support::Fresh;

/// Everything of a netns that netconfig may change.
const SHOWN: &str = "nft list ruleset; ip rule; ip -6 rule; ip route show table all; \
                     ip -6 route show table all; cat /proc/sys/net/ipv4/tcp_migrate_req";

fn state(fresh: &Fresh) -> String {
    fresh.command("sh", &["-ec", SHOWN])
}

fn netconfig_netns_state(netconfig: &Netconfig) -> String {
    let netns = format!("--net=/proc/{}/ns/net", netconfig.process.id());
    let mut command = Command::new("nsenter");
    let output = command.args([&netns, "--", "sh", "-ec", SHOWN]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn apply(redirection: Option<Redirection>, name: &str) -> ApplyRulesRequest {
    ApplyRulesRequest {
        sandbox: wire(name),
        redirection,
        probe_addresses: Vec::new(),
        require_listeners: false,
    }
}

/// A redirection with its invalid field.
type Wrong = (&'static str, AmbientRedirection);

fn wrong() -> Vec<Wrong> {
    let mut wrong = wrong_interfaces();
    wrong.extend(wrong_ports());
    wrong.extend(wrong_cidrs());
    wrong
}

fn wrong_interfaces() -> Vec<Wrong> {
    let one = |name: &str| vec![name.to_owned()];
    let bad = [
        "a b",
        " eth0",
        "eth0\n",
        "a\nadd table inet x",
        "eth0 lo",
        "",
    ];
    let many = (0..1_000).map(|number| format!("if{number}")).collect();
    let with = |reroute_virtual_interfaces| AmbientRedirection {
        reroute_virtual_interfaces,
        ..AmbientRedirection::default()
    };
    let lists = bad.iter().map(|name| one(name)).chain([many]);
    lists
        .map(|names| ("reroute_virtual_interfaces", with(names)))
        .collect()
}

fn wrong_ports() -> Vec<Wrong> {
    let lists: [Vec<u32>; 4] = [
        vec![0],
        vec![65_536],
        vec![80, u32::MAX],
        (1..=10_000).collect(),
    ];
    let with = |ports: Vec<u32>| {
        let outbound = Exclusions {
            outbound_ports: ports.clone(),
            ..Exclusions::default()
        };
        let inbound = Exclusions {
            inbound_ports: ports,
            ..Exclusions::default()
        };
        [
            excluded("exclusions.outbound_ports", outbound),
            excluded("exclusions.inbound_ports", inbound),
        ]
    };
    lists.into_iter().flat_map(with).collect()
}

fn wrong_cidrs() -> Vec<Wrong> {
    let one = |cidr: &str| vec![cidr.to_owned()];
    let many = (0..2_000).map(|number| format!("10.{}.{}.0/24", number / 256, number % 256));
    let lists = [
        one("10.0.0.1/8"),
        one("fd00::1/64"),
        one("10.0.0.0/8 "),
        many.collect(),
    ];
    let with = |cidrs: Vec<String>| {
        let outbound = Exclusions {
            outbound_cidrs: cidrs.clone(),
            ..Exclusions::default()
        };
        let inbound = Exclusions {
            inbound_cidrs: cidrs,
            ..Exclusions::default()
        };
        [
            excluded("exclusions.outbound_cidrs", outbound),
            excluded("exclusions.inbound_cidrs", inbound),
        ]
    };
    lists.into_iter().flat_map(with).collect()
}

fn excluded(field: &'static str, exclusions: Exclusions) -> Wrong {
    let redirection = AmbientRedirection {
        exclusions: Some(exclusions),
        ..AmbientRedirection::default()
    };
    (field, redirection)
}

#[tokio::test]
async fn a_redirection_with_a_wrong_field_is_refused_by_its_name_and_changes_nothing() {
    let mut netconfig = Netconfig::start().await;
    let (bare, ruled) = (pod_netns(), pod_netns());
    netconfig.claim("bare", &bare).await.unwrap();
    netconfig.claim("ruled", &ruled).await.unwrap();
    let applied = netconfig
        .client
        .apply_rules(apply(ambient(), "ruled"))
        .await;
    assert!(applied.unwrap().into_inner().changed);
    let states = |netconfig: &Netconfig| {
        [
            state(&bare),
            state(&ruled),
            netconfig_netns_state(netconfig),
        ]
    };
    let before = states(&netconfig);
    assert_ne!(before[0], before[1]);
    for (field, redirection) in wrong() {
        let redirection = Some(Redirection {
            mode: Some(Mode::Ambient(redirection)),
        });
        for name in ["bare", "ruled"] {
            for status in refusals(&mut netconfig, redirection.clone(), name).await {
                let failure = failure_of(&status);
                assert_eq!(
                    (status.code(), failure.reason, failure.field.as_str()),
                    (
                        Code::InvalidArgument,
                        Reason::InvalidField,
                        &*format!("redirection.ambient.{field}")
                    )
                );
            }
        }
        assert_eq!(states(&netconfig), before, "{field}");
    }
}

/// Sends it by each call that takes a redirection.
async fn refusals(
    netconfig: &mut Netconfig,
    redirection: Option<Redirection>,
    name: &str,
) -> [Status; 3] {
    let verify = VerifyRulesRequest {
        sandbox: wire(name),
        redirection: redirection.clone(),
    };
    let plan = PlanRulesRequest {
        sandbox: wire(name),
        redirection: redirection.clone(),
    };
    let client = &mut netconfig.client;
    [
        client
            .apply_rules(apply(redirection, name))
            .await
            .unwrap_err(),
        client.verify_rules(verify).await.unwrap_err(),
        client.plan_rules(plan).await.unwrap_err(),
    ]
}

/// Names netconfig's own netns.
struct Home(PathBuf);

impl Home {
    fn new(netconfig: &Netconfig) -> Self {
        std::fs::create_dir_all("/run/netns").unwrap();
        let home = Self(format!("/run/netns/home-{}", std::process::id()).into());
        std::fs::write(&home.0, "").unwrap();
        let netns = format!("/proc/{}/ns/net", netconfig.process.id());
        let status = Command::new("mount")
            .args(["--bind", &netns])
            .arg(&home.0)
            .status();
        assert!(status.unwrap().success());
        home
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-q").arg(&self.0).status());
        drop(std::fs::remove_file(&self.0));
    }
}

// scenario: 35
#[tokio::test]
async fn the_nodes_own_netns_is_out_of_reach_and_stays_as_it_is() {
    let mut netconfig = Netconfig::start().await;
    let before = netconfig_netns_state(&netconfig);
    let home = Home::new(&netconfig);
    let link = home.0.with_extension("link");
    std::os::unix::fs::symlink(&home.0, &link).unwrap();
    let own = netconfig.process.id();
    let held = File::open(&home.0).unwrap();
    let by_descriptor = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&held)
    );
    let refused = (Code::PermissionDenied, Reason::NetnsIsHost);
    let not_followed = (Code::InvalidArgument, Reason::NetnsPathRefused);
    for (path, wanted) in [
        ("/proc/1/ns/net", refused),
        ("/proc/self/ns/net", refused),
        ("/proc/thread-self/ns/net", refused),
        (&format!("/proc/{own}/ns/net"), refused),
        (&format!("/proc/{own}/task/{own}/ns/net"), refused),
        (home.0.to_str().unwrap(), refused),
        (link.to_str().unwrap(), not_followed),
        (&by_descriptor, not_followed),
        (&format!("/proc/{own}/root/proc/self/ns/net"), not_followed),
        (&format!("{}/../net", home.0.display()), not_followed),
    ] {
        assert_eq!(
            reached(&mut netconfig, at(path)).await,
            [wanted; 2],
            "{path}"
        );
    }
    std::fs::remove_file(&link).unwrap();
    assert!(netconfig.claims().await.is_empty());
    let status = netconfig
        .client
        .apply_rules(apply(ambient(), "home"))
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::ClaimUnknown)
    );
    assert_eq!(failure_of(&status).field, "sandbox");
    assert_eq!(netconfig_netns_state(&netconfig), before);
}

async fn reached(netconfig: &mut Netconfig, netns: NetnsRef) -> [(Code, Reason); 2] {
    let claim = netconfig
        .claim_at("home", netns.clone(), &[])
        .await
        .unwrap_err();
    let request = InspectNetnsRequest {
        target: Some(Target::Netns(netns)),
        ..InspectNetnsRequest::default()
    };
    let look = netconfig.client.inspect_netns(request).await.unwrap_err();
    [refusal(&claim), refusal(&look)]
}

#[tokio::test]
async fn another_pods_netns_cannot_be_claimed_and_nothing_done_to_the_own_one_reaches_it() {
    let mut netconfig = Netconfig::start().await;
    let (theirs, own) = (pod_netns(), pod_netns());
    netconfig.claim("theirs", &theirs).await.unwrap();
    netconfig
        .client
        .apply_rules(apply(ambient(), "theirs"))
        .await
        .unwrap();
    let (before, at_home) = (state(&theirs), netconfig_netns_state(&netconfig));
    let status = netconfig.claim("own", &theirs).await.unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::NetnsInUse)
    );
    for result in [
        netconfig
            .client
            .apply_rules(apply(ambient(), "own"))
            .await
            .map(drop),
        netconfig
            .client
            .remove_rules(removal("own"))
            .await
            .map(drop),
    ] {
        assert_eq!(
            refusal(&result.unwrap_err()),
            (Code::FailedPrecondition, Reason::ClaimUnknown)
        );
    }
    // A claim in use rejects another netns.
    netconfig.claim("own", &own).await.unwrap();
    let status = netconfig
        .claim_at("own", netns_ref(&theirs), &[])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&status),
        (Code::FailedPrecondition, Reason::NetnsMismatch)
    );
    netconfig
        .client
        .apply_rules(apply(ambient(), "own"))
        .await
        .unwrap();
    netconfig.client.remove_rules(removal("own")).await.unwrap();
    assert_eq!(
        (state(&theirs), netconfig_netns_state(&netconfig)),
        (before, at_home)
    );
}

fn removal(name: &str) -> RemoveRulesRequest {
    RemoveRulesRequest {
        sandbox: wire(name),
        phase: RemovePhase::Final.into(),
    }
}

/// A process that connects in a loop must not fill the node's disk with log lines.
#[tokio::test]
async fn refused_netns_sock_connections_share_a_log_line() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_netconfig"));
    command.stderr(File::create(&log).unwrap());
    // The test is a process of the host, which may read the claims, but not fetch descriptors.
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = own.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let own: Vec<_> = own.filter(|path| *path != "/").collect();
    let settings = [
        "--peer",
        "cgroup:/nowhere",
        "--host-cgroups",
        &own.join(","),
    ];
    let netconfig = Netconfig::start_by(command, &settings).await;
    for _ in 0..1_000 {
        assert!(is_closed(&mut netconfig.connect_to_netns_sock()));
    }
    let log = std::fs::read_to_string(&log).unwrap();
    // The throttle permits a line every 10 s, so a slow machine sees several lines.
    let refusals = log.matches("Refused a connection on netns.sock").count();
    assert!((1..=20).contains(&refusals), "{refusals} lines:\n{log}");
}
