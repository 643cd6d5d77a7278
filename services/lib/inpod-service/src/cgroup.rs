//! Finds out from a cgroup whether a process runs on the host or in a pod.

use std::fmt;

/// The paths in `/proc/<pid>/cgroup`, as seen from the cgroup namespace of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(Vec<String>);

impl Cgroup {
    /// Parses lines of the form `hierarchy:controllers:path` (cgroups(7)).
    pub fn parse(text: &str) -> Self {
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let mut paths: Vec<_> = paths
            .map(|path| path.trim_end_matches('/').to_owned())
            .collect();
        paths.sort();
        paths.dedup();
        Self(paths)
    }

    /// Returns whether the process is outside of pods and containers, so that no hierarchy names either.
    pub fn is_host(&self) -> bool {
        let mut segments = self.0.iter().flat_map(|path| path.split('/'));
        !segments.any(|segment| names_pod(segment) || names_container(segment))
    }

    /// Returns the cgroup of the process's pod. With a cgroup namespace of its own, a process sees its own path as `/`
    /// and the other containers of its pod as siblings below `/..`, so that the parent stands for the pod.
    pub fn pod(&self) -> Option<String> {
        self.0.iter().find_map(|path| pod_of(path))
    }

    /// Returns whether the process is in the cgroup `root` or below, in any hierarchy.
    pub fn is_below(&self, root: &str) -> bool {
        let root = root.trim_end_matches('/');
        let below = |path: &String| {
            path.strip_prefix(root)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.0.iter().any(below)
    }
}

impl fmt::Display for Cgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &String| if path.is_empty() { "/" } else { path }.to_owned();
        f.write_str(&self.0.iter().map(path).collect::<Vec<_>>().join(" "))
    }
}

fn pod_of(path: &str) -> Option<String> {
    let mut end = 0;
    for segment in path.split('/') {
        end += segment.len();
        if names_pod(segment) {
            return path.get(..end).map(str::to_owned);
        }
        end += 1;
    }
    let (parent, container) = without_crun(path).rsplit_once('/')?;
    // Two levels up without a name is the root, not a sibling.
    let is_sibling = parent.ends_with("..") && container != "..";
    is_sibling.then(|| parent.to_owned())
}

/// Returns a sibling's path in the form of runc. crun runs a container, and begins its cgroup namespace, in a cgroup
/// `container` below the container's own cgroup, so siblings are one level further away and end with this name.
fn without_crun(path: &str) -> &str {
    let sibling = path
        .strip_prefix("/..")
        .and_then(|rest| rest.strip_suffix("/container"));
    let name = sibling.and_then(|rest| rest.strip_prefix("/../"));
    match (sibling, name) {
        (Some(sibling), Some(name)) if names_container(name) => sibling,
        _ => path,
    }
}

/// Matches `pod<uid>` (cgroupfs) and `kubepods-burstable-pod<uid with underscores>.slice` (systemd). The UID of a
/// static pod has 32 hex digits.
fn names_pod(segment: &str) -> bool {
    let segment = segment.strip_suffix(".slice").unwrap_or(segment);
    let Some((before, uid)) = segment.rsplit_once("pod") else {
        return false;
    };
    let digits = uid.chars().filter(char::is_ascii_hexdigit).count();
    let uid_like = digits == 32
        && uid
            .chars()
            .all(|c| c.is_ascii_hexdigit() || matches!(c, '-' | '_'));
    uid_like && (before.is_empty() || before.ends_with('-'))
}

/// Matches `cri-containerd-<id>.scope`, `docker-<id>.scope`, `crio-<id>.scope`, `libpod-<id>.scope`, and a bare id of
/// 64 hex digits (docker, containerd and cgroupfs).
fn names_container(segment: &str) -> bool {
    let prefixes = [
        "cri-containerd-",
        "docker-",
        "crio-",
        "libpod-",
        "nerdctl-",
        "lxc.payload",
    ];
    let id_like = segment.len() == 64 && segment.chars().all(|c| c.is_ascii_hexdigit());
    id_like
        || (prefixes.iter().any(|prefix| segment.starts_with(prefix))
            && segment != "docker-proxy.service")
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "11111111_2222_3333_4444_555555555555";

    fn cgroup(path: &str) -> Cgroup {
        Cgroup::parse(&format!("9:name=systemd:/\n0::{path}\n"))
    }

    #[test]
    fn processes_of_systemd_units_are_host_processes() {
        for path in [
            "/",
            "/system.slice/containerd.service",
            "/user.slice/user-0.slice/session-1.scope",
        ] {
            assert!(cgroup(path).is_host(), "{path}");
        }
    }

    #[test]
    fn processes_of_pods_and_containers_are_not() {
        let id = "a".repeat(64);
        for path in [
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID}.slice/cri-containerd-{id}.scope"
            ),
            format!("/kubepods/besteffort/pod{}/{id}", UID.replace('_', "-")),
            format!("/kubepods/pod0123456789abcdef0123456789abcdef/{id}"),
            format!("/system.slice/docker-{id}.scope"),
            format!("/docker/{id}"),
            format!("/machine.slice/libpod-{id}.scope/container"),
            format!("/../crio-{id}.scope"),
        ] {
            assert!(!cgroup(&path).is_host(), "{path}");
        }
    }

    #[test]
    fn two_containers_of_one_pod_have_one_pod_cgroup() {
        let pod = format!("/kubepods.slice/kubepods-pod{UID}.slice");
        let one = cgroup(&format!("{pod}/cri-containerd-{}.scope", "a".repeat(64)));
        let two = cgroup(&format!("{pod}/crio-{}.scope/container", "b".repeat(64)));
        assert_eq!((one.pod(), two.pod()), (Some(pod.clone()), Some(pod)));
    }

    #[test]
    fn from_a_cgroup_namespace_a_sibling_container_has_the_parent_in_common_and_another_pod_has_not()
     {
        let own = Cgroup::parse("0::/");
        let sibling = cgroup(&format!("/../cri-containerd-{}.scope", "b".repeat(64)));
        let other = cgroup(&format!(
            "/../../kubepods-pod{UID}.slice/cri-containerd-{}.scope",
            "c".repeat(64)
        ));
        assert_eq!(own.pod(), None);
        assert_eq!(sibling.pod().as_deref(), Some("/.."));
        assert_ne!(other.pod(), sibling.pod());
        for above in ["/..", "/../..", "/../../.."] {
            assert_eq!(cgroup(above).pod(), None, "{above}");
        }
    }

    #[test]
    fn a_sibling_under_crun_is_one_level_further_away() {
        let id = "b".repeat(64);
        let sibling = cgroup(&format!("/../../crio-{id}.scope/container"));
        assert_eq!(sibling.pod().as_deref(), Some("/.."));
        for other in [
            // The paths of a container of another pod, and of cgroups outside of pods.
            format!("/../../../kubepods-pod{UID}.slice/crio-{id}.scope/container"),
            format!("/../../../crio-{id}.scope/container"),
            format!("/../../crio-{id}.scope/init.scope"),
            format!("/../../crio-{id}.scope"),
            "/../../session.scope/container".to_owned(),
            "/../../container".to_owned(),
        ] {
            let pod = cgroup(&other).pod();
            assert_ne!(pod.as_deref(), Some("/.."), "{other}");
        }
    }

    #[test]
    fn the_root_is_shown_as_a_slash_and_each_place_once() {
        let cgroup = Cgroup::parse("9:name=systemd:/\n8:cpu:/\n0::/system.slice/a.service\n");
        assert_eq!(cgroup.to_string(), "/ /system.slice/a.service");
    }

    #[test]
    fn at_or_below_a_path_counts_whole_segments() {
        let unit = cgroup("/system.slice/inpod.slice/netconfig.service");
        assert!(unit.is_below("/system.slice/inpod.slice"));
        assert!(unit.is_below("/system.slice/inpod.slice/netconfig.service/"));
        assert!(!unit.is_below("/system.slice/inpod"));
    }
}
