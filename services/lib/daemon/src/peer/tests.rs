use std::os::unix::net::UnixStream;

use super::*;

fn policy(service: Service) -> Policy {
    Policy {
        uid: nix::unistd::geteuid().as_raw(),
        service,
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
            .all(|class| peer.may(*class))
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
    assert!(!peer.may(Class::Service));
    assert!(matches!(
        policy.admit(&left, Class::Service),
        Err(Refused::Class(..))
    ));
    assert_eq!(
        peer.require(Class::Service).unwrap_err().code(),
        tonic::Code::PermissionDenied
    );
}

/// Linux before 6.5: what is there is there, and what the peer is and may do is the same.
#[test]
fn on_a_kernel_without_pidfds_of_peers_a_peer_is_known_by_its_pid() {
    let (left, _right) = UnixStream::pair().unwrap();
    let missing: [fn(BorrowedFd<'_>) -> nix::Result<OwnedFd>; 2] = [
        |_| Err(nix::Error::ENOPROTOOPT),
        |_| Err(nix::Error::EINVAL),
    ];
    for root in ["/nowhere", "/"] {
        let policy = || policy(Service::Below(root.into()));
        let with = policy().identify(&left).unwrap();
        for missing in missing {
            let without = Policy {
                pidfd_of: missing,
                ..policy()
            };
            assert_eq!(without.identify(&left).unwrap(), with);
        }
        assert_eq!(with.may(Class::Service), root == "/");
    }
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
    assert!(matches!(of(i32::MAX), Err(Refused::Unseen(_))));
}

#[test]
fn a_call_without_a_known_peer_may_do_nothing() {
    let peer = of(&tonic::Request::new(()));
    assert!(
        [Class::Read, Class::Cni, Class::Operator, Class::Service]
            .iter()
            .all(|class| !peer.may(*class))
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
