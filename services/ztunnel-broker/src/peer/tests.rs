use super::*;

const ZTUNNEL: &str = "11111111-2222-3333-4444-555555555555";
const OTHER: &str = "66666666-7777-8888-9999-000000000000";
const ID: &str = "4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e";

/// NET_ADMIN, NET_RAW and SYS_ADMIN.
const THREE: u64 = 0x20_3000;

fn policy(setting: &str) -> Policy {
    let three = Capabilities::permitted(&format!("CapPrm:\t{THREE:016x}\n")).unwrap();
    Policy::new(
        setting.parse().unwrap(),
        RequiredCapabilities::Exactly(three),
    )
}

fn process(path: &str, permitted: u64) -> ProcessInfo {
    ProcessInfo {
        pid: 7,
        cgroup: format!("3:cpu:/\n0::{path}\n"),
        permitted: Capabilities::permitted(&format!("CapPrm:\t{permitted:016x}\n")),
    }
}

fn in_pod(uid: &str) -> ProcessInfo {
    process(&format!("/kubepods/burstable/pod{uid}/{ID}"), THREE)
}

fn ztunnel_pods(uids: &[&str]) -> Option<BTreeSet<PodUid>> {
    Some(uids.iter().map(|uid| uid.parse().unwrap()).collect())
}

#[test]
fn a_process_of_a_pod_that_is_a_ztunnel_is_admitted_with_its_cgroup_and_pod() {
    let peer = policy("pod").check(&in_pod(ZTUNNEL), ztunnel_pods(&[OTHER, ZTUNNEL]).as_ref());
    let expected = Peer {
        pid: 7,
        cgroup: Some(format!("/ /kubepods/burstable/pod{ZTUNNEL}/{ID}")),
        pod_uid: Some(ZTUNNEL.parse().unwrap()),
    };
    assert_eq!(peer.unwrap(), expected);
}

#[test]
fn the_uid_is_the_same_as_systemd_and_as_a_cgroup_namespace_write_it() {
    let uid = ZTUNNEL.replace('-', "_");
    for path in [
        format!(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/cri-containerd-{ID}.scope"
        ),
        format!("/../../kubepods-pod{uid}.slice/crio-{ID}.scope"),
    ] {
        let peer = policy("pod").check(&process(&path, THREE), ztunnel_pods(&[ZTUNNEL]).as_ref());
        assert_eq!(peer.unwrap().pod_uid.unwrap().as_str(), ZTUNNEL, "{path}");
    }
}

#[test]
fn a_static_pod_is_known_by_the_hash_that_its_cgroup_names() {
    let hash = "0123456789abcdef0123456789abcdef";
    let peer = policy("pod").check(&in_pod(hash), ztunnel_pods(&[hash]).as_ref());
    assert_eq!(peer.unwrap().pod_uid.unwrap().as_str(), hash);
}

#[test]
fn another_pod_may_be_reported_as_a_ztunnel_later_and_so_may_any_before_the_first_report() {
    for ztunnels in [ztunnel_pods(&[ZTUNNEL]), ztunnel_pods(&[]), None] {
        let error = policy("pod")
            .check(&in_pod(OTHER), ztunnels.as_ref())
            .unwrap_err();
        assert!(error.may_be_admitted_later(), "{error}");
        assert!(error.to_string().contains(OTHER) && error.origin().contains(OTHER));
    }
}

#[test]
fn a_process_in_no_pod_will_never_be_welcome() {
    let nested = format!("/kubepods/pod{OTHER}/{ID}/kubepods/pod{ZTUNNEL}/{ID}");
    for path in [
        "/",
        "/system.slice/ztunnel.service",
        &format!("/kubepods/pod{ZTUNNEL}"),
        &format!("/docker/{ID}"),
        // A container may create cgroups of its own.
        &nested,
    ] {
        let error = policy("pod")
            .check(&process(path, THREE), ztunnel_pods(&[ZTUNNEL]).as_ref())
            .unwrap_err();
        assert!(
            matches!(error, AdmissionError::NoPod { .. }),
            "{path}: {error}"
        );
        assert!(!error.may_be_admitted_later());
    }
}

#[test]
fn a_ztunnel_with_other_capabilities_is_refused_with_the_difference() {
    for (permitted, words) in [
        (u64::MAX >> 23, "too many: CHOWN"),
        (0x3000, "lacks SYS_ADMIN"),
        (0, "lacks NET_ADMIN, NET_RAW, SYS_ADMIN"),
    ] {
        let process = ProcessInfo {
            permitted: process("/", permitted).permitted,
            ..in_pod(ZTUNNEL)
        };
        let error = policy("pod")
            .check(&process, ztunnel_pods(&[ZTUNNEL]).as_ref())
            .unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(!error.may_be_admitted_later());
        let any = Policy::new(Setting::Pod, RequiredCapabilities::Any);
        any.check(&process, ztunnel_pods(&[ZTUNNEL]).as_ref())
            .unwrap();
    }
    let unreadable = ProcessInfo {
        permitted: None,
        ..in_pod(ZTUNNEL)
    };
    let error = policy("pod").check(&unreadable, ztunnel_pods(&[ZTUNNEL]).as_ref());
    assert!(matches!(error, Err(AdmissionError::Capabilities { .. })));
}

#[test]
fn with_a_cgroup_only_the_place_counts() {
    let policy = policy("cgroup:/system.slice/mesh.slice");
    let peer = |path: &str| policy.check(&process(path, 0), None);
    let at = peer("/system.slice/mesh.slice/ztunnel.service").unwrap();
    assert!(at.cgroup.unwrap().contains("ztunnel.service"));
    let error = peer("/system.slice/mesh.sliced").unwrap_err();
    assert!(
        matches!(error, AdmissionError::WrongCgroup { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_socket_of_another_user_is_refused_whatever_the_policy() {
    let (left, _right) = UnixSeqpacket::pair().unwrap();
    for setting in ["pod", "cgroup:/", "uid"] {
        let policy = Policy {
            uid: 4_000_000,
            ..policy(setting)
        };
        let error = policy.identify(&left).unwrap_err();
        assert!(matches!(error, AdmissionError::Uid { .. }), "{error}");
    }
}

#[tokio::test]
async fn this_process_is_itself_and_in_no_container_of_ztunnels() {
    let (left, _right) = UnixSeqpacket::pair().unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    for setting in ["cgroup:/", "uid"] {
        let policy = policy(setting);
        let candidate = policy.identify(&left).unwrap();
        assert_eq!(policy.admit(&candidate, None).unwrap().pid, own);
    }
    let policy = policy("pod");
    let candidate = policy.identify(&left).unwrap();
    let refused = policy.admit(&candidate, ztunnel_pods(&[ZTUNNEL]).as_ref());
    assert!(!refused.unwrap_err().to_string().is_empty());
}
