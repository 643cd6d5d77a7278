//! Finds the pod and container in a process's cgroup file, and decides whether the process is the host's, proc(5)
//! (services/docs/facts/istio-ambient.md, 5.2). The parser is hand-written for linear time, because a container with
//! the right to create cgroups chooses part of the text.

mod paths;

pub use paths::{Cgroup, HostCgroup};

use crate::ContainerId;

/// The number of digits in a UUID, and in the hash of a static pod.
const DIGITS: usize = 32;

/// The numbers of digits after which a UUID has a separator.
const GROUPS: [usize; 4] = [8, 12, 16, 20];

/// A pod's UID in lower case and without separators: cgroupfs writes hyphens, systemd writes underscores, and the UID
/// of a static pod is the MD5 hash of its manifest, without separators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodKey([u8; DIGITS]);

impl PodKey {
    /// Returns `None` if the UID is neither a UUID nor 32 hexadecimal digits; no cgroup has such a name.
    pub fn from_uid(uid: &str) -> Option<Self> {
        let (key, rest) = Self::parse_prefix(uid)?;
        rest.is_empty().then_some(key)
    }

    /// Parses a UID of at most 36 bytes, and returns the rest of the text.
    fn parse_prefix(text: &str) -> Option<(Self, &str)> {
        let (mut digits, mut count) = ([0; DIGITS], 0);
        for (at, byte) in text.bytes().enumerate() {
            if byte.is_ascii_hexdigit() {
                *digits.get_mut(count)? = byte.to_ascii_lowercase();
                count += 1;
            } else if !is_separator(byte, count, text.as_bytes().get(at.checked_sub(1)?)) {
                return None;
            }
            if count == DIGITS {
                let rest = text.get(at.saturating_add(1)..)?;
                return Some((Self(digits), rest));
            }
        }
        None
    }
}

/// Accepts a separator only at the places where a UUID has one.
fn is_separator(byte: u8, digits: usize, before: Option<&u8>) -> bool {
    matches!(byte, b'-' | b'_')
        && GROUPS.contains(&digits)
        && before.is_some_and(u8::is_ascii_hexdigit)
}

/// A container of a pod, as named by a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodContainer {
    /// The pod, identified by its UID.
    pub pod: PodKey,
    /// The container of the process in the pod.
    pub container: ContainerId,
}

/// Finds a process's container in its cgroup file. Returns `None` if no line names a container, if lines differ, or if
/// one line names two pods: a container that may create cgroups can append another pod's name to its own, but not
/// replace its own.
pub fn find_container(text: &str) -> Option<PodContainer> {
    let mut found = None;
    for line in text.lines() {
        match (parse_path(path_of_line(line)?), &found) {
            (Line::NoPod, _) => {}
            (Line::Ambiguous, _) => return None,
            (Line::Container(place), None) => found = Some(place),
            (Line::Container(place), Some(other)) if place == *other => {}
            (Line::Container(_), Some(_)) => return None,
        }
    }
    found
}

/// Returns the path in a line of the form `hierarchy:controllers:path`. A path may contain colons.
fn path_of_line(line: &str) -> Option<&str> {
    let path = line.splitn(3, ':').nth(2)?;
    path.starts_with('/').then_some(path)
}

enum Line {
    NoPod,
    Container(PodContainer),
    Ambiguous,
}

fn parse_path(path: &str) -> Line {
    let mut found: Option<PodContainer> = None;
    let mut components = path.split('/').peekable();
    while let Some(component) = components.next() {
        let Some((pod, rest)) = parse_pod(component) else {
            continue;
        };
        if found.as_ref().is_some_and(|found| found.pod != pod) {
            return Line::Ambiguous;
        }
        // The cgroup below the pod's is the container's, whatever follows (systemd's init.scope, crun's `container`).
        // containerd's systemd driver puts both into one component.
        let of_container = match rest.rsplit_once(':') {
            Some((_, name)) => Some(name),
            None => components.peek().copied(),
        };
        if let (None, Some(container)) = (&found, of_container.and_then(parse_container)) {
            found = Some(PodContainer { pod, container });
        }
    }
    found.map_or(Line::NoPod, Line::Container)
}

/// Accepts `pod<uid>` and `kubepods-burstable-pod<uid>.slice`, and returns the text after the UID.
fn parse_pod(component: &str) -> Option<(PodKey, &str)> {
    component.match_indices("pod").find_map(|(at, word)| {
        let (before, after) = component.split_at_checked(at)?;
        let (pod, rest) = PodKey::parse_prefix(after.get(word.len()..)?)?;
        let is_whole = before.bytes().next_back().is_none_or(is_edge)
            && rest.bytes().next().is_none_or(is_edge);
        is_whole.then_some((pod, rest))
    })
}

fn is_edge(byte: u8) -> bool {
    byte.is_ascii_punctuation()
}

/// Parses an id at the end of a component: `<id>`, `cri-containerd-<id>.scope`, `crio-conmon-<id>.scope`, `kata_<id>`.
fn parse_container(component: &str) -> Option<ContainerId> {
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let id = name.rsplit(|c: char| c.is_ascii_punctuation()).next()?;
    id.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::{prelude::*, sample::select};

    use super::*;

    const POD: &str = "11111111-2222-3333-4444-55555555abcd";
    const SLICE: &str = "11111111_2222_3333_4444_55555555abcd";
    const HASH: &str = "0123456789abcdef0123456789abcdef";
    const ID: &str = "4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e4d2f0c8e";

    /// Replaces the placeholders of UIDs and of the container id.
    fn filled(shape: &str) -> String {
        shape
            .replace("<uid>", POD)
            .replace("<uid_>", SLICE)
            .replace("<hash>", HASH)
            .replace("<cid>", ID)
    }

    fn is_found(text: &str, uid: &str) {
        let wanted = PodContainer {
            pod: PodKey::from_uid(uid).unwrap(),
            container: ID.parse().unwrap(),
        };
        assert_eq!(find_container(&filled(text)), Some(wanted), "{text}");
    }

    #[test]
    fn the_paths_of_every_runtime_and_driver_name_pod_and_container() {
        for path in [
            // Paths of cgroupfs, from docker and containerd.
            "/kubepods/burstable/pod<uid>/<cid>",
            "/kubepods/besteffort/pod<uid>/<cid>",
            "/kubepods/pod<uid>/<cid>",
            // Paths of systemd, from docker, containerd and CRI-O.
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/docker-<cid>.scope",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<cid>.scope",
            "/kubepods.slice/kubepods-pod<uid_>.slice/cri-containerd-<cid>.scope",
            "/kubepods-besteffort-pod<uid_>.slice:cri-containerd:<cid>",
            "/system.slice/containerd.service/kubepods-besteffort-pod<uid_>.slice:cri-containerd:<cid>",
            "/kubepods.slice/kubepods-besteffort-pod<uid_>.slice/crio-<cid>.scope",
            "/kubepods.slice/kubepods-besteffort-pod<uid_>.slice/crio-conmon-<cid>.scope",
            // crun creates a cgroup of its own below the container's.
            "/kubepods.slice/kubepods-besteffort-pod<uid_>.slice/crio-<cid>.scope/container",
            "/kubepods.slice/kubepods-besteffort-pod<uid_>.slice/crio-<cid>.scope/payload",
            // Paths as seen from a cgroup namespace.
            "/../../pod<uid>/<cid>",
            "/../../kubepods-besteffort-pod<uid_>.slice/cri-containerd-<cid>.scope",
            // Paths on a node that is a container itself (kind, minikube).
            "/system.slice/docker-ab12.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod<uid_>.slice/cri-containerd-<cid>.scope",
            "/docker/ab12/kubelet/kubepods/besteffort/pod<uid>/<cid>",
            // systemd runs inside the container.
            "/kubepods/burstable/pod<uid>/<cid>/init.scope",
            "/kubepods/burstable/pod<uid>/<cid>/system.slice/foo.service",
            // Kata adds a prefix to the id.
            "/kubepods/burstable/pod<uid>/kata_<cid>",
            // The container created further cgroups for itself.
            "/kubepods/burstable/pod<uid>/<cid>/pod<uid>/other",
        ] {
            is_found(&format!("0::{path}\n"), POD);
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Owner {
        Host,
        PodContainer,
        OtherContainer,
        Unknown,
    }

    fn owner(text: &str) -> Owner {
        let cgroup = Cgroup::parse(text);
        match (find_container(text), cgroup.is_host(&[])) {
            (Some(_), false) => Owner::PodContainer,
            (None, true) => Owner::Host,
            (None, false) if cgroup.names_workload() => Owner::OtherContainer,
            (None, false) => Owner::Unknown,
            (Some(container), true) => panic!("{text}: {container:?} is a process of the host"),
        }
    }

    const OWNERS: &[(Owner, &str)] = &[
        (Owner::Host, "/"),
        (Owner::Host, "/init.scope"),
        (Owner::Host, "/system.slice/containerd.service"),
        (Owner::Host, "/system.slice/crio.service"),
        (Owner::Host, "/system.slice/k3s.service"),
        (
            Owner::Host,
            "/system.slice/snap.microk8s.daemon-containerd.service",
        ),
        (Owner::Host, "/system.slice/docker-proxy.service"),
        (Owner::Host, "/system.slice/lvm2-pvscan@8:2.service"),
        (Owner::Host, "/system.slice/foo.service (deleted)"),
        (Owner::Host, "/user.slice/user-0.slice/session-1.scope"),
        (
            Owner::Host,
            "/user.slice/user-0.slice/user@0.service/app.slice/vte-spawn-<uid>.scope",
        ),
        // Gardener, Bottlerocket, Talos, OpenRC and k3d.
        (Owner::Host, "/podruntime.slice/containerd.service"),
        (Owner::Host, "/runtime.slice/containerd.service"),
        (Owner::Host, "/podruntime/runtime"),
        (Owner::Host, "/openrc.containerd"),
        (Owner::Host, "/init"),
        // The cgroup namespace of an agent's container, also on a node that is a container itself.
        (Owner::Host, "/../../../.."),
        (Owner::Host, "/../../../../init.scope"),
        (Owner::Host, "/../../system.slice/containerd.service"),
        (Owner::PodContainer, "/kubepods/burstable/pod<uid>/<cid>"),
        (
            Owner::PodContainer,
            "/kubepods/burstable/pod<uid>/<cid>/system.slice/a.service",
        ),
        (Owner::PodContainer, "/../../pod<uid>/<cid>"),
        (
            Owner::PodContainer,
            "/kubepods.slice/kubepods-pod<uid_>.slice/crio-<cid>.scope/container",
        ),
        (
            Owner::PodContainer,
            "/kubepods-besteffort-pod<uid_>.slice:cri-containerd:<cid>",
        ),
        (
            Owner::PodContainer,
            "/system.slice/containerd.service/kubepods-besteffort-pod<uid_>.slice:cri-containerd:<cid>",
        ),
        (
            Owner::PodContainer,
            "/system.slice/crio.service/kubepods-besteffort-pod<uid_>.slice:crio:<cid>",
        ),
        (Owner::OtherContainer, "/kubepods/burstable/pod<uid>"),
        (
            Owner::OtherContainer,
            "/system.slice/kubepods/burstable/another-name",
        ),
        (Owner::OtherContainer, "/docker/<cid>"),
        (Owner::OtherContainer, "/docker/4d2f0c8e4d2f"),
        (
            Owner::OtherContainer,
            "/docker/<cid>/system.slice/containerd.service",
        ),
        (Owner::OtherContainer, "/system.slice/docker-<cid>.scope"),
        (
            Owner::OtherContainer,
            "/system.slice/docker-4d2f0c8e4d2f.scope",
        ),
        (
            Owner::OtherContainer,
            "/system.slice/docker-<cid>.scope/system.slice/containerd.service",
        ),
        (
            Owner::OtherContainer,
            "/system.slice/docker.service/docker/4d2f0c8e4d2f",
        ),
        (Owner::OtherContainer, "/system.slice/4d2f0c8e4d2f"),
        (
            Owner::OtherContainer,
            "/system.slice/containerd.service/system.slice:docker:<cid>",
        ),
        (Owner::OtherContainer, "/../cri-containerd-<cid>.scope"),
        (
            Owner::OtherContainer,
            "/machine.slice/libpod-<cid>.scope/container",
        ),
        (
            Owner::OtherContainer,
            "/machine.slice/systemd-nspawn@a.service/payload",
        ),
        (
            Owner::OtherContainer,
            "/system.slice/systemd-nspawn@a.service",
        ),
        (
            Owner::OtherContainer,
            "/machine.slice/machine-qemu\\x2d1\\x2da.scope",
        ),
        (Owner::OtherContainer, "/nomad/a"),
        (
            Owner::OtherContainer,
            "/nomad.slice/share.slice/a.web.scope",
        ),
        (Owner::OtherContainer, "/system.slice/buildkit/wkz1v2h7r8k9"),
        (Owner::OtherContainer, "/buildkit/wkz1v2h7r8k9"),
        (Owner::OtherContainer, "/lxc/a"),
        (
            Owner::OtherContainer,
            "/user.slice/user-0.slice/session-1.scope/lxc/a",
        ),
        (
            Owner::OtherContainer,
            "/lxc.payload.a/system.slice/ssh.service",
        ),
        (Owner::Unknown, "/containerd"),
        (Owner::Unknown, "/system.slices/a"),
        (Owner::Unknown, "/default/admin"),
        (Owner::Unknown, "/a/system.slice/b.service"),
        (Owner::Unknown, "relative"),
    ];

    #[test]
    fn discovery_and_callers_agree_on_the_owner_of_a_cgroup() {
        for &(wanted, path) in OWNERS {
            let text = filled(&format!("0::{path}\n"));
            assert_eq!(owner(&text), wanted, "{path}");
            // A hierarchy in which the process stays at the root changes nothing.
            assert_eq!(owner(&format!("3:cpuset:/\n{text}")), wanted, "{path}");
        }
        for text in [
            "",
            "nonsense\n",
            "0::/\nnonsense\n",
            "4:memory:/a\n0::/init.scope\n",
        ] {
            assert_eq!(owner(text), Owner::Unknown, "{text}");
        }
    }

    #[test]
    fn a_static_pod_is_known_by_the_hash_of_its_manifest() {
        is_found("0::/kubepods/burstable/pod<hash>/<cid>\n", HASH);
        is_found(
            "0::/kubepods.slice/kubepods-burstable-pod<hash>.slice/cri-containerd-<cid>.scope\n",
            HASH,
        );
    }

    #[test]
    fn every_hierarchy_of_version_1_may_say_the_same_or_nothing() {
        is_found(
            "12:cpu,cpuacct:/kubepods/burstable/pod<uid>/<cid>\n\
             3:cpuset:/\n\
             1:name=systemd:/kubepods/burstable/pod<uid>/<cid>/init.scope\n\
             0::/system.slice/containerd.service\n",
            POD,
        );
    }

    #[test]
    fn what_names_no_pod_or_no_container_is_nowhere() {
        for path in [
            "/",
            "/system.slice/containerd.service",
            "/../crio-<cid>.scope",
            "/../cri-containerd-<cid>.scope",
            "/kata_overhead/<cid>",
            "/machine.slice/libpod-<cid>.scope",
            "/kubepods/burstable/pod<uid>",
            "/kubepods/burstable/pod<uid>/",
            "/kubepods.slice/kubepods-burstable-pod<uid_>.slice",
            "/kubepods/burstable/mypod/<cid>",
            "/kubepods/burstable/tripod<uid>/<cid>",
            "/kubepods/burstable/pod<uid>0/<cid>",
            "/kubepods/burstable/pod11111111-2222-3333-4444--5555555abcd/<cid>",
            "/kubepods/burstable/pod1111-11112222-3333-4444-55555555abcd/<cid>",
            "/kubepods/burstable/pod<uid>/.scope",
        ] {
            assert_eq!(
                find_container(&filled(&format!("0::{path}\n"))),
                None,
                "{path}"
            );
        }
    }

    #[test]
    fn a_container_cannot_name_another_pod_after_its_own() {
        let other = "/kubepods/burstable/pod<uid>/<cid>/pod<hash>/ab12";
        assert_eq!(find_container(&filled(&format!("0::{other}\n"))), None);
    }

    #[test]
    fn lines_that_disagree_or_are_cut_off_are_nowhere() {
        for text in [
            "2:cpu:/kubepods/pod<uid>/<cid>\n1:pids:/kubepods/pod<hash>/<cid>\n",
            "2:cpu:/kubepods/pod<uid>/<cid>\n1:pids:/kubepods/pod<uid>/ab12\n",
            "0::/kubepods/pod<uid>/<cid>\nnonsense\n",
            "0::/kubepods/pod<uid>/<cid>\n1:pids\n",
        ] {
            assert_eq!(find_container(&filled(text)), None, "{text}");
        }
        assert_eq!(find_container(""), None);
    }

    #[test]
    fn a_uid_is_the_same_with_hyphens_underscores_and_capitals() {
        assert_eq!(PodKey::from_uid(POD), PodKey::from_uid(SLICE));
        assert_eq!(PodKey::from_uid(POD), PodKey::from_uid(&POD.to_uppercase()));
        for bad in [
            "",
            "pod",
            "1111",
            &format!("{POD}1"),
            "ä",
            &HASH.replace('f', "g"),
        ] {
            assert_eq!(PodKey::from_uid(bad), None, "{bad}");
        }
    }

    /// A megabyte would be slow for a backtracking matcher, but is fast here even in a debug build.
    #[test]
    fn a_line_of_a_megabyte_is_read_in_linear_time() {
        const LENGTH: usize = 1 << 20;
        for piece in [
            "pod",
            "pod1",
            "-pod",
            "/pod",
            "crio-",
            "/crio-a",
            ":",
            "/",
            "pod11111111-2222-3333-4444-",
            "pod11111111-2222-3333-4444-55555555abc-",
            "/pod11111111-2222-3333-4444-55555555abcd",
            "_",
        ] {
            let line = format!("0::{}", piece.repeat(LENGTH / piece.len()));
            let began = Instant::now();
            let found = find_container(&line);
            let cgroup = Cgroup::parse(&line);
            assert!(!cgroup.is_host(&[]) || piece == "/", "{piece}");
            assert!(cgroup.pod().is_none() || piece.ends_with("abcd"), "{piece}");
            assert!(began.elapsed() < Duration::from_secs(20), "{piece}");
            assert!(
                found.is_none() || piece.ends_with("abcd"),
                "{piece}: {found:?}"
            );
        }
    }

    fn segment() -> impl Strategy<Value = String> {
        let pieces = [
            "system.slice",
            "user.slice",
            "init.scope",
            "..",
            "kubepods",
            "kubepods-besteffort-",
            "pod<uid>",
            "pod<uid_>",
            "pod<hash>",
            ".slice",
            ":cri-containerd:",
            ":",
            "<cid>",
            "cri-containerd-",
            "kata_",
            ".scope",
            "containerd.service",
            "4d2f0c",
            "container",
        ];
        prop::collection::vec(select(pieces.to_vec()), 1..6).prop_map(|pieces| pieces.concat())
    }

    fn line() -> impl Strategy<Value = String> {
        let path = prop::collection::vec(segment(), 0..5);
        let hierarchy = select(vec!["0:", "1:name=systemd", "4:memory", "12:cpu,cpuacct"]);
        (hierarchy, path).prop_map(|(hierarchy, path)| format!("{hierarchy}:/{}", path.join("/")))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_container_of_a_pod_is_never_a_host_process(
            lines in prop::collection::vec(line(), 1..4),
        ) {
            let text = filled(&lines.join("\n"));
            if find_container(&text).is_some() {
                let cgroup = Cgroup::parse(&text);
                prop_assert!(!cgroup.is_host(&[]));
                prop_assert!(!cgroup.is_host(&["/".parse().unwrap()]));
            }
        }
    }
}
