use super::*;

const ZTUNNEL: &str = "11111111-2222-3333-4444-555555555555";
const OTHER: &str = "66666666-7777-8888-9999-000000000000";
const ID: &str = "4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e";

fn policy(setting: &str) -> Policy {
    Policy::new(setting.parse().unwrap())
}

/// Checks a process in a cgroup.
fn check(
    setting: &str,
    path: &str,
    ztunnels: Option<&BTreeSet<PodUid>>,
) -> Result<Peer, NotAdmitted> {
    let text = format!("3:cpu:/\n0::{path}\n");
    policy(setting).check(7, &text, ztunnels)
}

fn in_pod(uid: &str) -> String {
    format!("/kubepods/burstable/pod{uid}/{ID}")
}

fn ztunnel_pods(uids: &[&str]) -> Option<BTreeSet<PodUid>> {
    Some(uids.iter().map(|uid| uid.parse().unwrap()).collect())
}

#[test]
fn a_process_of_a_pod_that_is_a_ztunnel_is_admitted_with_its_cgroup_and_pod() {
    let peer = check(
        "pod",
        &in_pod(ZTUNNEL),
        ztunnel_pods(&[OTHER, ZTUNNEL]).as_ref(),
    );
    let cgroup = format!("/ /kubepods/burstable/pod{ZTUNNEL}/{ID}");
    let expected = Peer::new(7, Some(cgroup), Some(ZTUNNEL.parse().unwrap()));
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
        let peer = check("pod", &path, ztunnel_pods(&[ZTUNNEL]).as_ref());
        assert_eq!(peer.unwrap().pod_uid.unwrap().as_str(), ZTUNNEL, "{path}");
    }
}

#[test]
fn a_static_pod_is_known_by_the_hash_that_its_cgroup_names() {
    let hash = "0123456789abcdef0123456789abcdef";
    let peer = check("pod", &in_pod(hash), ztunnel_pods(&[hash]).as_ref());
    assert_eq!(peer.unwrap().pod_uid.unwrap().as_str(), hash);
}

#[test]
fn another_pod_may_be_reported_as_a_ztunnel_later_and_so_may_any_before_the_first_report() {
    for ztunnels in [ztunnel_pods(&[ZTUNNEL]), ztunnel_pods(&[]), None] {
        let error = check("pod", &in_pod(OTHER), ztunnels.as_ref()).unwrap_err();
        assert!(error.may_come, "{error}");
        assert!(error.why.contains(OTHER) && error.origin.contains(OTHER));
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
        let error = check("pod", path, ztunnel_pods(&[ZTUNNEL]).as_ref()).unwrap_err();
        let expected = "is in no pod's container";
        assert!(error.why.contains(expected), "{path}: {error}");
        assert!(!error.may_come);
    }
}

#[test]
fn with_a_cgroup_only_the_place_counts() {
    let peer = |path: &str| check("cgroup:/system.slice/mesh.slice", path, None);
    let at = peer("/system.slice/mesh.slice/ztunnel.service").unwrap();
    assert!(at.cgroup.unwrap().contains("ztunnel.service"));
    let error = peer("/system.slice/mesh.sliced").unwrap_err();
    let expected = "is not at /system.slice/mesh.slice or below";
    assert!(error.why.contains(expected), "{error}");
}
