//! Finds out from a process's cgroups whether the process belongs to the host, to a pod or to a service.

use std::{fmt, str::FromStr};

use super::{parse_pod, path_of_line};

/// The top-level cgroups of processes of the node itself: those of systemd, the slices that distributions give to the
/// container runtime (Gardener, Bottlerocket, Talos), and the cgroup into which k3d moves process 1.
const HOST_ROOTS: [&str; 7] = [
    "init.scope",
    "system.slice",
    "user.slice",
    "podruntime.slice",
    "runtime.slice",
    "podruntime",
    "init",
];

/// OpenRC names the cgroup of a service `openrc.containerd`.
const OPENRC_PREFIX: &str = "openrc.";

/// Cgroups below which container managers create a cgroup for each container or machine.
const MANAGERS: [&str; 9] = [
    "docker",
    "podman",
    "libpod_parent",
    "lxc",
    "nomad",
    "nomad.slice",
    "buildkit",
    "machine.slice",
    "payload",
];

/// Prefixes of the cgroups of containers and machines. The systemd unit `docker-proxy.service` has such a prefix, too,
/// but is a process of the host.
const CONTAINER_PREFIXES: [&str; 7] = [
    "cri-containerd-",
    "docker-",
    "crio-",
    "libpod-",
    "nerdctl-",
    "machine-",
    "lxc.",
];

/// The unit of a systemd-nspawn machine, which may be outside of `machine.slice`.
const NSPAWN_PREFIX: &str = "systemd-nspawn@";

/// The number of digits in the short form of a container id, by which docker names cgroups on some hosts.
const SHORT_ID_DIGITS: usize = 12;

/// The number of digits in a container id.
const ID_DIGITS: usize = 64;

/// Stands for the path of a malformed line. The path of a valid line begins with a slash.
const MALFORMED: &str = "(malformed)";

/// A cgroup that the operator declares to be the host's for lack of a known name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCgroup(String);

impl FromStr for HostCgroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            Ok(Self(text.trim_end_matches('/').to_owned()))
        } else {
            Err(format!("\"{text}\" is not the absolute path of a cgroup"))
        }
    }
}

/// The paths in `/proc/<pid>/cgroup`, as seen from the own cgroup namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(Vec<String>);

impl Cgroup {
    /// Parses lines of the form `hierarchy:controllers:path` (cgroups(7)). A line of another form counts as a path
    /// that belongs neither to the host nor to a service.
    pub fn parse(text: &str) -> Self {
        let paths = text.lines().map(|line| match path_of_line(line) {
            Some(path) => path.trim_end_matches('/').to_owned(),
            None => MALFORMED.to_owned(),
        });
        let mut paths: Vec<_> = paths.collect();
        paths.sort();
        paths.dedup();
        Self(paths)
    }

    /// Returns whether every hierarchy names a known cgroup of the host. The operator declares further cgroups. A cgroup
    /// with an unknown name may belong to a container.
    pub fn is_host(&self, further: &[HostCgroup]) -> bool {
        let is_declared = |path: &str| further.iter().any(|root| is_declared_host(path, root));
        let is_host = |path: &String| is_known_host(path) || is_declared(path);
        !self.0.is_empty() && self.0.iter().all(is_host)
    }

    /// Returns whether any hierarchy names a pod or a container.
    pub fn names_workload(&self) -> bool {
        self.0.iter().any(|path| names(path).any(is_workload))
    }

    /// Returns the cgroup of the process's pod. With a cgroup namespace of its own, a process sees its own path as `/`
    /// and the other containers of its pod as siblings below `/..`, so that the parent stands for the pod. Returns
    /// `None` if hierarchies name different pods.
    pub fn pod(&self) -> Option<String> {
        let mut found = None;
        for path in &self.0 {
            match (pod_of(path), &found) {
                (None, _) => {}
                (Some(pod), None) => found = Some(pod),
                (Some(pod), Some(other)) if pod == *other => {}
                (Some(_), Some(_)) => return None,
            }
        }
        found
    }

    /// Returns whether the process is in the cgroup `root` or below. A hierarchy of cgroup v1 may leave the process in
    /// a cgroup of the host, but not in one of another service or pod.
    pub fn is_below(&self, root: &str) -> bool {
        let root = root.trim_end_matches('/');
        let is_below = |path: &String| {
            path.strip_prefix(root)
                .is_some_and(|rest| rest.starts_with('/') || (rest.is_empty() && is_absolute(path)))
        };
        self.0.iter().any(is_below)
            && (self.0.iter()).all(|path| is_below(path) || is_known_host(path))
    }
}

impl fmt::Display for Cgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &String| if path.is_empty() { "/" } else { path }.to_owned();
        f.write_str(&self.0.iter().map(path).collect::<Vec<_>>().join(" "))
    }
}

/// Accepts a path without the slash at the end, so that the root is empty.
fn is_absolute(path: &str) -> bool {
    path.is_empty() || path.starts_with('/')
}

/// Returns the names in a path after the `..` that leave the own cgroup namespace.
fn names(path: &str) -> impl Iterator<Item = &str> {
    let names = path.split('/').skip(usize::from(is_absolute(path)));
    names.skip_while(|name| *name == "..")
}

fn is_known_host(path: &str) -> bool {
    names(path).next().is_none_or(is_host_root) && !names(path).any(is_workload)
}

fn is_declared_host(path: &str, HostCgroup(root): &HostCgroup) -> bool {
    let mut names = names(path);
    let is_at_or_below = root
        .split('/')
        .skip(1)
        .all(|part| names.next() == Some(part));
    is_absolute(path) && is_at_or_below && !names.any(is_workload)
}

fn is_host_root(name: &str) -> bool {
    HOST_ROOTS.contains(&name) || name.starts_with(OPENRC_PREFIX)
}

fn pod_of(path: &str) -> Option<String> {
    let mut start = 0;
    for name in path.split('/') {
        if let Some((_, rest)) = parse_pod(name) {
            // In the form `slice:prefix:id`, the slice is the pod's.
            let after = rest.find(':').map_or(0, |colon| rest.len() - colon);
            return path.get(..start + name.len() - after).map(str::to_owned);
        }
        start += name.len() + 1;
    }
    let (parent, container) = without_crun(path).rsplit_once('/')?;
    // Two levels up without a name is the root, not a sibling.
    let is_sibling = parent.ends_with("/..") && container != ".." && !is_host_root(container);
    is_sibling.then(|| parent.to_owned())
}

/// Returns a sibling's path in the form of runc. crun runs a container, and begins its cgroup namespace, in a cgroup
/// `container` below the container's own cgroup, so siblings are a level further away and end with `/container`.
fn without_crun(path: &str) -> &str {
    let sibling = path
        .strip_prefix("/..")
        .and_then(|rest| rest.strip_suffix("/container"));
    let name = sibling.and_then(|rest| rest.strip_prefix("/../"));
    match (sibling, name) {
        (Some(sibling), Some(name)) if is_container(name) => sibling,
        _ => path,
    }
}

fn is_workload(name: &str) -> bool {
    let is_kubepods = || {
        name.split(|c: char| !c.is_ascii_alphanumeric())
            .any(|it| it == "kubepods")
    };
    parse_pod(name).is_some() || is_container(name) || is_kubepods()
}

/// Accepts the cgroup of a container (`cri-containerd-<id>.scope`, `slice:prefix:id`, or an id alone) or of a
/// container manager.
fn is_container(name: &str) -> bool {
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_id = |token: &str| token.len() == ID_DIGITS && is_hex(token);
    let bare = name.strip_suffix(".scope").unwrap_or(name);
    let is_of_runtime = CONTAINER_PREFIXES
        .iter()
        .any(|prefix| name.starts_with(prefix));
    MANAGERS.contains(&name)
        || name.starts_with(NSPAWN_PREFIX)
        || name.split(|c: char| c.is_ascii_punctuation()).any(is_id)
        || (bare.len() >= SHORT_ID_DIGITS && is_hex(bare))
        || name.matches(':').count() == 2
        || (is_of_runtime && !name.ends_with(".service"))
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
            assert!(cgroup(path).is_host(&[]), "{path}");
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
            assert!(!cgroup(&path).is_host(&[]), "{path}");
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
    fn siblings_in_a_cgroup_namespace_share_a_parent() {
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
    fn the_root_is_shown_as_a_slash_and_each_path_once() {
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

    #[test]
    fn a_service_is_below_in_each_hierarchy_that_is_not_the_hosts() {
        const ROOT: &str = "/inpod.slice";
        let is_below = |text: &str| Cgroup::parse(text).is_below(ROOT);
        assert!(is_below(
            "4:memory:/\n1:name=systemd:/inpod.slice/a\n0::/inpod.slice/a\n"
        ));
        // Before runc 1.1, a container stays in the runtime's cgroup of version 2.
        assert!(is_below(
            "4:memory:/inpod.slice/a\n0::/system.slice/containerd.service\n"
        ));
        for text in [
            "4:memory:/inpod.slice/a\n0::/kubepods/pod1/a\n",
            "4:memory:/inpod.slice/a\n0::/other\n",
            "4:memory:/inpod.slice/a\n0::/system.slice/docker-aaaaaaaaaaaa.scope\n",
            "4:memory:/inpod.slice/a\nnonsense\n",
            "4:memory:/\n0::/system.slice/a.service\n",
            "",
        ] {
            assert!(!is_below(text), "{text}");
        }
        assert!(Cgroup::parse("0::/\n").is_below("/"));
    }

    #[test]
    fn hierarchies_that_name_different_pods_are_in_no_pod() {
        let pod = format!("/kubepods/pod{UID}");
        let other = format!("/kubepods/pod{}", UID.replace('1', "2"));
        let of = |one: &str, two: &str| Cgroup::parse(&format!("4:memory:{one}\n0::{two}\n")).pod();
        let id = "a".repeat(64);
        let container = format!("{pod}/{id}");
        assert_eq!(of(&container, "/"), Some(pod.clone()));
        assert_eq!(
            of(&container, "/system.slice/containerd.service"),
            Some(pod.clone())
        );
        assert_eq!(of(&container, &format!("{other}/{id}")), None);
        // runc leaves a container of a kind node in the node's cgroup if a controller is new.
        let node = format!("/docker/{id}");
        let nested = format!("{node}/kubelet{container}");
        assert_eq!(of(&nested, &node), Some(format!("{node}/kubelet{pod}")));
    }

    /// Containers of all pods are siblings there: the parent stands for no pod.
    #[test]
    fn a_slice_with_prefix_and_id_names_the_pod() {
        let path = |letter: &str| {
            let id = letter.repeat(64);
            format!("/kubepods-besteffort-pod{UID}.slice:cri-containerd:{id}")
        };
        let pod = format!("/kubepods-besteffort-pod{UID}.slice");
        assert_eq!(cgroup(&path("a")).pod(), Some(pod.clone()));
        assert_eq!(cgroup(&path("b")).pod(), Some(pod.clone()));
        let sibling = cgroup(&format!("/..{}", path("b"))).pod();
        assert_eq!(sibling, Some(format!("/..{pod}")));
    }

    #[test]
    fn a_declared_cgroup_is_the_hosts_but_no_container_below_it() {
        let id = "a".repeat(64);
        let is_host = |declared: &str, path: &str| {
            let cgroup = Cgroup::parse(&format!("0::{path}\n"));
            cgroup.is_host(&[declared.parse().unwrap()])
        };
        for path in ["/containerd", "/containerd/a", "/../../containerd"] {
            assert!(is_host("/containerd/", path), "{path}");
            assert!(is_host("/", path), "{path}");
            assert!(!is_host("/other", path), "{path}");
        }
        for path in [
            "/containerd-2".to_owned(),
            format!("/containerd/kubepods-pod{UID}.slice:cri-containerd:{id}"),
            format!("/containerd/{id}"),
        ] {
            assert!(!is_host("/containerd", &path), "{path}");
        }
        assert!(!is_host("/", &format!("/docker/{id}")));
        // On a node that is a container itself, the operator may declare a part of the container.
        let node = format!("/docker/{id}/system.slice");
        assert!(is_host(&node, &format!("{node}/containerd.service")));
        assert!("containerd".parse::<HostCgroup>().is_err());
    }
}
