use std::os::unix::net::UnixStream;

use super::*;

fn policy(service: Service) -> Policy {
    Policy {
        uid: nix::unistd::geteuid().as_raw(),
        service,
        host_cgroups: Vec::new(),
        pidfd_of,
    }
}

#[test]
fn a_process_of_the_same_user_may_do_everything_under_uid() {
    let (left, _right) = UnixStream::pair().unwrap();
    let peer = policy(Service::Anyone).identify(&left).unwrap();
    assert_eq!(peer.pid, i32::try_from(std::process::id()).unwrap());
    assert!(
        [Class::Read, Class::Cni, Class::Operator, Class::Service]
            .iter()
            .all(|class| peer.may_call(*class))
    );
}

#[test]
fn another_user_is_refused_whatever_the_policy() {
    let (left, _right) = UnixStream::pair().unwrap();
    let policy = Policy {
        uid: 4_000_000,
        ..policy(Service::Anyone)
    };
    assert!(matches!(policy.identify(&left), Err(Refused::Uid(_))));
}

#[test]
fn a_process_outside_the_cgroup_is_no_service_but_a_host_process() {
    let (left, _right) = UnixStream::pair().unwrap();
    let policy = policy(Service::Below("/nowhere".into()));
    let peer = policy.identify(&left).unwrap();
    assert_eq!(peer.pid, i32::try_from(std::process::id()).unwrap());
    assert!(!peer.may_call(Class::Service));
    assert!(matches!(
        policy.authorize(&left, Class::Service),
        Err(Refused::Class(..))
    ));
    assert_eq!(
        peer.require(Class::Service, "/a.Service/Call")
            .unwrap_err()
            .code(),
        tonic::Code::PermissionDenied
    );
}

/// Before Linux 6.5, the identified peer and its rights are the same.
#[test]
fn on_a_kernel_without_pidfds_of_peers_a_peer_is_known_by_its_pid() {
    let (left, _right) = UnixStream::pair().unwrap();
    for root in ["/nowhere", "/"] {
        let policy = || policy(Service::Below(root.into()));
        let with = policy().identify(&left).unwrap();
        let without = Policy {
            pidfd_of: |_| Err(nix::Error::ENOPROTOOPT),
            ..policy()
        };
        assert_eq!(without.identify(&left).unwrap(), with);
        assert_eq!(with.may_call(Class::Service), root == "/");
    }
}

/// By now, the pid may belong to another process. On Linux 6.5 to 6.15, EINVAL means an ended peer, not a missing
/// feature.
#[test]
fn a_peer_that_has_ended_is_not_looked_for_by_its_pid() {
    let (left, _right) = UnixStream::pair().unwrap();
    let ended: [fn(BorrowedFd<'_>) -> nix::Result<OwnedFd>; 2] =
        [|_| Err(nix::Error::EINVAL), |_| Err(nix::Error::ESRCH)];
    for pidfd_of in ended {
        let policy = Policy {
            pidfd_of,
            ..policy(Service::Below("/".into()))
        };
        assert!(matches!(policy.identify(&left), Err(Refused::Invisible)));
    }
}

#[test]
#[ignore = "the other process of the next test: connects, and waits to be ended"]
fn another_process() {
    if let Ok(_held) = UnixStream::connect("s") {
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
}

/// A socket outlives the connecting process if another process holds the socket.
#[test]
fn a_peer_that_has_ended_is_refused_whether_it_was_waited_for_or_not() {
    ended_peers_are_refused(pidfd_of);
}

#[test]
fn so_it_is_on_a_kernel_without_pidfds_of_peers() {
    ended_peers_are_refused(|_| Err(nix::Error::ENOPROTOOPT));
}

fn ended_peers_are_refused(pidfd_of: fn(BorrowedFd<'_>) -> nix::Result<OwnedFd>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut child = std::process::Command::new("/proc/self/exe")
        .args(["--exact", "--ignored", "peer::tests::another_process"])
        .current_dir(dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let of_peer = || Process::new(pidfd_of(accepted.as_fd()), pid);
    let process = of_peer().unwrap();
    assert_eq!(process.pid().unwrap(), pid);
    assert!(process.read("status").unwrap().1.contains("CapPrm"));
    child.kill().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while process.pid().is_ok() {
        assert!(std::time::Instant::now() < deadline, "it is still there");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // The process is not reaped, so its pid and procfs directory still exist.
    assert!(fs::exists(format!("/proc/{}/cgroup", child.id())).unwrap());
    assert!(matches!(process.read("cgroup"), Err(Refused::Invisible)));
    child.wait().unwrap();
    assert!(matches!(process.pid(), Err(Refused::Invisible)));
    assert!(of_peer().and_then(|it| it.pid()).is_err());
}

#[test]
fn a_peer_whose_pidfd_is_refused_is_not_looked_at_another_way() {
    let (left, _right) = UnixStream::pair().unwrap();
    let policy = Policy {
        pidfd_of: |_| Err(nix::Error::EPERM),
        ..policy(Service::Below("/".into()))
    };
    assert!(matches!(policy.identify(&left), Err(Refused::Unseen(_))));
}

#[test]
fn without_a_pidfd_a_pid_that_is_not_visible_or_gone_is_refused() {
    let of = |pid| cgroup_of(Err(nix::Error::ENOPROTOOPT), pid);
    assert!(matches!(of(0), Err(Refused::Invisible)));
    assert!(matches!(of(i32::MAX), Err(Refused::Invisible)));
}

#[test]
fn a_call_without_a_known_peer_may_do_nothing() {
    let peer = of_request(&tonic::Request::new(()));
    assert!(
        [Class::Read, Class::Cni, Class::Operator, Class::Service]
            .iter()
            .all(|class| !peer.may_call(*class))
    );
}

#[test]
fn the_policy_pod_is_refused_outside_of_a_pod() {
    let host = Cgroup::parse("0::/system.slice/x.service");
    assert!(matches!(own_pod(&host), Err(PolicyError::NotInPod)));
}

#[test]
fn a_misspelt_policy_is_named() {
    assert!("pods".parse::<Setting>().unwrap_err().contains("pods"));
    assert!("cgroup:relative".parse::<Setting>().is_err());
    assert_eq!("cgroup:/a".parse(), Ok(Setting::Cgroup("/a".into())));
}

#[test]
fn an_unknown_cgroup_is_refused_and_the_setting_is_named() {
    let peer = |path: &str| {
        let cgroup = Cgroup::parse(&format!("0::{path}\n"));
        Peer {
            host: cgroup.is_host(&[]),
            cgroup: Some(cgroup),
            ..UNKNOWN_PEER
        }
    };
    let refusal = |path: &str, class| {
        let refused = peer(path).require(class, "/a.Service/Call");
        refused.unwrap_err().message().to_owned()
    };
    let unknown = refusal("/containerd", Class::Cni);
    assert!(
        unknown.contains("/containerd") && unknown.contains("host_cgroups"),
        "{unknown}"
    );
    assert!(peer("/system.slice/containerd.service").may_call(Class::Cni));
    // The setting would be wrong for a container, and does not open the calls of services.
    let container = format!("/docker/{}", "a".repeat(64));
    assert!(!refusal(&container, Class::Cni).contains("host_cgroups"));
    assert!(!refusal("/containerd", Class::Service).contains("host_cgroups"));
}

#[test]
fn a_process_in_one_of_host_cgroups_is_a_host_process() {
    let (left, _right) = UnixStream::pair().unwrap();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = own.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let policy = |host_cgroups| Policy {
        host_cgroups,
        ..policy(Service::Below("/nowhere".into()))
    };
    let declared = policy(own.map(|path| path.parse().unwrap()).collect());
    assert!(declared.identify(&left).unwrap().may_call(Class::Cni));
}
