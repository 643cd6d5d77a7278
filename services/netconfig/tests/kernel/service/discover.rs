//! Pods discovered without a CNI call: real processes in real cgroups.

use std::{
    process::{Child, Command},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use inpod_proto::{
    netconfig::v1::{ApplyRulesRequest, FindNetnsRequest, FindNetnsResponse, ListClaimsRequest},
    types::v1::{NetnsRef, SandboxRef},
};
use inpod_types::Reason;
use tonic::{Code, Status};

use crate::harness::{Netconfig, ambient, at, pod_netns, refusal};
use crate::service::cgroups::Cgroups;
use crate::support::Fresh;

const ADDRESS: &str = "10.9.0.1";

/// Its UID is unique: all tests search the same processes.
struct Pod {
    uid: String,
    cgroups: Cgroups,
}

impl Pod {
    fn new() -> Self {
        static COUNT: AtomicU16 = AtomicU16::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        Self {
            uid: format!("{pid:08x}-{number:04x}-3333-4444-55555555abcd"),
            cgroups: Cgroups::new(&number.to_string()),
        }
    }

    fn start(&self, fresh: &Fresh, container: char) -> Sleeper {
        let sleeper = Sleeper::inside(fresh);
        self.put(&sleeper, container);
        sleeper
    }

    /// Uses containerd's path with the systemd driver.
    fn put(&self, process: &Sleeper, container: char) {
        let uid = self.uid.replace('-', "_");
        let id = id(container);
        let path = format!("kubepods-burstable-pod{uid}.slice/cri-containerd-{id}.scope");
        self.cgroups.put(process.pid(), &path);
    }

    async fn find(
        &self,
        netconfig: &mut Netconfig,
        address: &str,
    ) -> Result<FindNetnsResponse, Status> {
        let request = FindNetnsRequest {
            pod_uid: self.uid.clone(),
            addresses: vec![address.to_owned()],
        };
        Ok(netconfig.client.find_netns(request).await?.into_inner())
    }

    async fn is_not_found(&self, netconfig: &mut Netconfig, address: &str) -> String {
        let status = self.find(netconfig, address).await.unwrap_err();
        assert_eq!(refusal(&status), NOT_FOUND, "{status}");
        status.message().to_owned()
    }
}

struct Sleeper(Child);

impl Sleeper {
    fn inside(fresh: &Fresh) -> Self {
        let mut command = Command::new("sleep");
        command.arg("60");
        Self(fresh.run(move || command.spawn()).unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn id(container: char) -> String {
    container.to_string().repeat(64)
}

fn found_sandbox(container: char) -> SandboxRef {
    SandboxRef {
        network_name: String::new(),
        container_id: id(container),
        ifname: "eth0".to_owned(),
    }
}

const NOT_FOUND: (Code, Reason) = (Code::NotFound, Reason::NetnsNotFound);

#[tokio::test]
async fn a_pod_of_before_is_found_by_its_oldest_process_and_claimed() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, pod) = (pod_netns(), Pod::new());
    let oldest = pod.start(&fresh, 'a');
    let _younger = pod.start(&fresh, 'b');
    let first = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    assert_eq!(first.sandbox, Some(found_sandbox('a')));
    assert_eq!(first.netns, Some(fresh.netns.id().into()));
    assert_eq!(first.path, format!("/proc/{}/ns/net", oldest.pid()));
    let process = first.process.clone().unwrap();
    assert_eq!(
        (process.pid, process.command.as_str(), process.sandbox_own),
        (oldest.pid(), "sleep", true)
    );
    assert!(process.start_time > 0);
    assert_eq!(pod.find(&mut netconfig, ADDRESS).await.unwrap(), first);
    let claims = netconfig.client.list_claims(ListClaimsRequest {}).await;
    let claims = claims.unwrap().into_inner().claims;
    assert_eq!(claims.len(), 1);
    let claim = &claims[0];
    assert_eq!(
        (&claim.sandbox, &claim.netns, &claim.path),
        (&first.sandbox, &first.netns, &first.path)
    );
    assert_eq!(claim.addresses, [ADDRESS]);
    let request = ApplyRulesRequest {
        sandbox: first.sandbox,
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    netconfig.client.apply_rules(request).await.unwrap();
    assert!(fresh.nft("list ruleset").contains("inpod-nat"));
}

#[tokio::test]
async fn a_found_claim_lives_as_long_as_any_process_is_in_the_netns_and_keeps_its_name() {
    let mut netconfig = Netconfig::start().await;
    let (mut fresh, pod) = (pod_netns(), Pod::new());
    let oldest = pod.start(&fresh, 'a');
    let younger = pod.start(&fresh, 'b');
    let first = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    fresh.abandon();
    drop(oldest);
    // Longer than the sweeps' interval.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(netconfig.claims().await.len(), 1);
    let second = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    assert_eq!(
        (&second.sandbox, &second.netns),
        (&first.sandbox, &first.netns)
    );
    assert_eq!(second.path, format!("/proc/{}/ns/net", younger.pid()));
    let process = second.process.unwrap();
    assert_eq!((process.pid, process.sandbox_own), (younger.pid(), false));
    assert_eq!(netconfig.claims().await.len(), 1);
    drop(younger);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !netconfig.claims().await.is_empty() {
        assert!(
            Instant::now() < deadline,
            "the claim of a dead netns is held"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    pod.is_not_found(&mut netconfig, ADDRESS).await;
}

#[tokio::test]
async fn a_netns_that_a_cni_call_was_seen_for_is_in_use() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, pod) = (pod_netns(), Pod::new());
    let _process = pod.start(&fresh, 'a');
    netconfig.claim("c1", &fresh).await.unwrap();
    let status = pod.find(&mut netconfig, ADDRESS).await.unwrap_err();
    let in_use = (Code::FailedPrecondition, Reason::NetnsInUse);
    assert_eq!(refusal(&status), in_use, "{status}");
    // The field `netns` of a claim is no field of a search.
    assert_eq!(inpod_proto::failure_of(&status).field, "");
    assert!(netconfig.release("c1").await);
    pod.find(&mut netconfig, ADDRESS).await.unwrap();
    let status = netconfig.claim("c1", &fresh).await.unwrap_err();
    assert_eq!(refusal(&status), in_use, "{status}");
}

#[tokio::test]
async fn what_is_not_in_a_netns_with_one_of_the_pods_addresses_is_not_found() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, pod) = (pod_netns(), Pod::new());
    pod.is_not_found(&mut netconfig, ADDRESS).await;
    // A process in the node's netns.
    let on_node = Sleeper(Command::new("sleep").arg("60").spawn().unwrap());
    pod.put(&on_node, 'a');
    pod.is_not_found(&mut netconfig, ADDRESS).await;
    // A process of another pod.
    let other = Pod::new();
    let _other = other.start(&fresh, 'a');
    pod.is_not_found(&mut netconfig, ADDRESS).await;
    // A netns with another address.
    let _own = pod.start(&fresh, 'b');
    let message = pod.is_not_found(&mut netconfig, "10.9.0.7").await;
    assert!(message.contains(ADDRESS), "{message}");
    assert!(netconfig.claims().await.is_empty());
    pod.find(&mut netconfig, ADDRESS).await.unwrap();
}

#[tokio::test]
async fn without_the_right_to_look_at_the_pods_processes_that_is_told() {
    let mut netconfig = Netconfig::start_without("sys_ptrace").await;
    let (fresh, pod) = (pod_netns(), Pod::new());
    let _process = pod.start(&fresh, 'a');
    let message = pod.is_not_found(&mut netconfig, ADDRESS).await;
    let wanted = "1 of its processes cannot be inspected (CAP_SYS_PTRACE is needed)";
    assert!(message.contains(wanted), "{message}");
}

#[tokio::test]
async fn a_second_netns_with_the_pods_address_is_refused() {
    let mut netconfig = Netconfig::start().await;
    let pod = Pod::new();
    let (without, with, another) = (Fresh::new(), pod_netns(), pod_netns());
    let first = [&without, &with].map(|fresh| pod.start(fresh, 'a'));
    let found = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    assert_eq!(found.netns, Some(with.netns.id().into()));
    let second = pod.start(&another, 'a');
    let message = pod.is_not_found(&mut netconfig, ADDRESS).await;
    for process in [&first[1], &second] {
        let named = format!("of process {}", process.pid());
        assert!(message.contains(&named), "{message}");
    }
}

/// Creates a netns in a user namespace of its own, as any process can, and gives the pod's address to an interface.
fn make_netns(commands: &str) -> Sleeper {
    let script = format!("{commands} && exec sleep 60");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c", &script]);
    let process = Sleeper(command.spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    let name = format!("/proc/{}/comm", process.pid());
    while std::fs::read_to_string(&name).unwrap() != "sleep\n" {
        assert!(Instant::now() < deadline, "{commands}");
        std::thread::sleep(Duration::from_millis(10));
    }
    process
}

const ETH0: &str = "ip link add eth0 type veth peer name peer && ip addr add 10.9.0.1/24 dev eth0 && \
                    ip link set eth0 up";

#[tokio::test]
async fn a_netns_that_the_pods_first_process_made_is_not_taken() {
    let mut netconfig = Netconfig::start().await;
    for commands in ["ip addr add 10.9.0.1/32 dev lo", ETH0] {
        let (fresh, pod) = (pod_netns(), Pod::new());
        let made = make_netns(commands);
        pod.put(&made, 'a');
        let _process = pod.start(&fresh, 'b');
        let result = pod.find(&mut netconfig, ADDRESS).await;
        let users = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        let is_alone = users.split_whitespace().nth(2) == Some("1");
        match result {
            Ok(found) => assert_eq!(found.netns, Some(fresh.netns.id().into()), "{commands}"),
            // Without root, no user namespace has more than one user.
            Err(status) if is_alone => assert_eq!(refusal(&status), NOT_FOUND, "{status}"),
            Err(status) => panic!("{commands}: {status}"),
        }
    }
}

#[tokio::test]
async fn a_pod_with_users_of_its_own_is_found_and_programmed() {
    let mut netconfig = Netconfig::start().await;
    let pod = Pod::new();
    let process = make_netns(ETH0);
    pod.put(&process, 'a');
    let found = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    let owner = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
    assert_ne!(owner(&process.pid().to_string()), owner("self"));
    let request = ApplyRulesRequest {
        sandbox: found.sandbox,
        redirection: ambient(),
        probe_addresses: Vec::new(),
        require_listeners: false,
    };
    assert!(
        netconfig
            .client
            .apply_rules(request)
            .await
            .unwrap()
            .into_inner()
            .changed
    );
}

#[tokio::test]
async fn a_search_that_says_too_little_is_refused_by_its_field() {
    const UID: &str = "11111111-2222-3333-4444-55555555abcd";
    let mut netconfig = Netconfig::start().await;
    for (pod_uid, addresses, field) in [
        ("", vec![ADDRESS], "pod_uid"),
        ("a b", vec![ADDRESS], "pod_uid"),
        ("../../etc", vec![ADDRESS], "pod_uid"),
        (UID, vec![], "addresses"),
        (UID, vec!["10.9.0"], "addresses"),
        (UID, vec!["::ffff:10.9.0.1"], "addresses"),
    ] {
        let request = FindNetnsRequest {
            pod_uid: pod_uid.to_owned(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
        };
        let status = netconfig.client.find_netns(request).await.unwrap_err();
        let refused = (Code::InvalidArgument, Reason::InvalidField);
        assert_eq!(refusal(&status), refused, "{pod_uid} {addresses:?}");
        assert_eq!(inpod_proto::failure_of(&status).field, field);
    }
}

/// A restarted pod-events claims the netns that it knows by path and identity.
#[tokio::test]
async fn a_found_netns_can_be_claimed_again_under_its_name_and_is_found_under_it() {
    let mut netconfig = Netconfig::start().await;
    let (fresh, pod) = (pod_netns(), Pod::new());
    let process = pod.start(&fresh, 'a');
    let id = fresh.netns.id();
    let request = inpod_proto::netconfig::v1::ClaimNetnsRequest {
        sandbox: Some(found_sandbox('z')),
        netns: Some(NetnsRef {
            device: Some(id.device),
            inode: Some(id.inode),
            cookie: Some(id.cookie),
            ..at(&format!("/proc/{}/ns/net", process.pid()))
        }),
        addresses: vec![ADDRESS.to_owned()],
        ..inpod_proto::netconfig::v1::ClaimNetnsRequest::default()
    };
    netconfig.client.claim_netns(request).await.unwrap();
    let found = pod.find(&mut netconfig, ADDRESS).await.unwrap();
    assert_eq!(found.sandbox, Some(found_sandbox('z')));
    assert!(!found.process.unwrap().sandbox_own);
}
