//! The table of permissions (deploy/docs/security.md) as data.

/// A container's permissions and share of the node.
pub(crate) struct Rights {
    pub(crate) container: &'static str,
    pub(crate) capabilities: &'static [&'static str],
    /// The runtime's AppArmor profile is disabled.
    pub(crate) is_unconfined: bool,
    pub(crate) has_token: bool,
    /// Host paths and their mounts. `CONF`, `BIN`, `RUNTIME` and `NETNS` depend on the platform.
    pub(crate) mounts: &'static [(&'static str, How)],
    pub(crate) others: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Read,
    Write,
    /// Read-only; the node's later mounts are propagated.
    Follow,
}

pub(crate) const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const LEAVE: &str = "/etc/inpod/leave";
const IN_POD: &str = "/var/run/secrets/kubernetes.io/pod";

pub(crate) const RIGHTS: [Rights; 5] = [
    Rights {
        container: "pod-events",
        capabilities: &[],
        is_unconfined: false,
        has_token: true,
        mounts: &[
            ("/run/inpod/pod-events", How::Write),
            ("/run/inpod/netconfig", How::Read),
            ("/run/inpod/ztunnel-broker", How::Read),
            ("/run/inpod/installer", How::Read),
            ("/var/lib/inpod/plugin", How::Write),
        ],
        others: &[LEAVE, TOKEN],
    },
    Rights {
        container: "netconfig",
        capabilities: &["NET_ADMIN", "NET_BROADCAST", "SYS_ADMIN", "SYS_PTRACE"],
        is_unconfined: true,
        has_token: false,
        mounts: &[
            ("/run/inpod/netconfig", How::Write),
            ("/run/inpod/netns", How::Write),
            ("NETNS", How::Follow),
        ],
        others: &[IN_POD],
    },
    Rights {
        container: "ztunnel-broker",
        capabilities: &[],
        is_unconfined: false,
        has_token: false,
        mounts: &[
            ("/run/inpod/ztunnel-broker", How::Write),
            ("/run/inpod/netns", How::Read),
            ("/var/run/ztunnel", How::Write),
        ],
        others: &[IN_POD],
    },
    Rights {
        container: "installer",
        capabilities: &[],
        is_unconfined: false,
        has_token: false,
        mounts: &[
            ("/run/inpod/installer", How::Write),
            ("/host/var/lib/inpod", How::Write),
            ("/hostCONF", How::Write),
            ("/hostBIN", How::Write),
            ("/hostRUNTIME", How::Read),
        ],
        others: &[LEAVE, IN_POD],
    },
    Rights {
        container: REPAIR,
        capabilities: &[],
        is_unconfined: false,
        has_token: true,
        mounts: &[
            ("/run/inpod/repair", How::Write),
            ("/run/inpod/pod-events", How::Read),
        ],
        others: &[TOKEN],
    },
];

/// A pod of its own that shares nothing of the node.
pub(crate) const REPAIR: &str = "repair";

/// pod-events mounts this for repair's metrics.
pub(crate) const OF_REPAIR: (&str, How) = ("/run/inpod/repair", How::Read);

pub(crate) struct Platform {
    pub(crate) name: &'static str,
    pub(crate) conf: &'static str,
    pub(crate) bin: &'static str,
    /// Mount points of the node's netns; first the host path.
    pub(crate) netns: &'static [&'static str],
}

const CONF: &str = "/etc/cni/net.d";
const BIN: &str = "/opt/cni/bin";
const NETNS: &[&str] = &["/var/run/netns", "/run/netns"];
const K3S: &str = "/var/lib/rancher/k3s/agent/etc/cni/net.d";

const fn platform(name: &'static str, conf: &'static str, bin: &'static str) -> Platform {
    Platform {
        name,
        conf,
        bin,
        netns: NETNS,
    }
}

impl Platform {
    pub(crate) fn has_repair(&self) -> bool {
        self.name == REPAIR
    }

    /// Returns the directory with the configuration of the container runtime.
    pub(crate) fn runtime(&self) -> &'static str {
        match self.name {
            "k3s" | "k3d" => "/var/lib/rancher/k3s/agent/etc/containerd",
            "microk8s" => "/var/snap/microk8s/current/args",
            "openshift" => "/etc/crio",
            _ => "/etc/containerd",
        }
    }
}

/// Overlays of `repair`, each with the permission it adds: API group, resource, verb.
pub(crate) const OVER: [(&str, &str, &str); 3] = [
    ("repair-label", "pods/status", "patch"),
    ("repair-unknown", "pods/status", "patch"),
    ("repair-delete", "pods", "delete"),
];

pub(crate) const PLATFORMS: [Platform; 10] = [
    platform("combined", CONF, BIN),
    platform("split", CONF, BIN),
    platform(REPAIR, CONF, BIN),
    platform("startup-taints", CONF, BIN),
    platform("gke", CONF, "/home/kubernetes/bin"),
    platform("k3s", K3S, "/var/lib/rancher/k3s/data/cni"),
    platform("k3d", K3S, "/bin"),
    platform(
        "microk8s",
        "/var/snap/microk8s/current/args/cni-network",
        "/var/snap/microk8s/current/opt/cni/bin",
    ),
    Platform {
        netns: &["/var/run/docker/netns"],
        ..platform("minikube", CONF, BIN)
    },
    platform("openshift", "/etc/cni/multus/net.d", "/var/lib/cni/bin"),
];

/// At the API server: role, group, resource, allowed names, verbs.
pub(crate) type Rule = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
);

pub(crate) const RULES: [Rule; 12] = [
    (
        "inpod-pod-events",
        "",
        &["pods", "namespaces"],
        &[],
        &["get", "list", "watch"],
    ),
    ("inpod-pod-events", "", &["pods/status"], &[], &["patch"]),
    (
        "inpod-pod-events",
        "events.k8s.io",
        &["events"],
        &[],
        &["create", "patch"],
    ),
    ("inpod-pod-events", "", &["nodes"], &[], &["get", "patch"]),
    ("inpod-repair", "", &["pods"], &[], &["list", "watch"]),
    (
        "inpod-repair",
        "events.k8s.io",
        &["events"],
        &[],
        &["create", "patch"],
    ),
    ("inpod-repair", "", &["pods/status"], &[], &["patch"]),
    ("inpod-repair", "", &["pods"], &[], &["delete"]),
    (
        "inpod-leave",
        "",
        &["configmaps"],
        &["inpod-leave"],
        &["get", "patch"],
    ),
    ("inpod-leave", "", &["pods"], &[], &["list"]),
    ("inpod-leave", "", &["nodes"], &[], &["list"]),
    (
        "inpod-privileged",
        "security.openshift.io",
        &["securitycontextconstraints"],
        &["privileged"],
        &["use"],
    ),
];

pub(crate) const BINDINGS: [(&str, &str); 5] = [
    ("inpod-pod-events", "pod-events"),
    ("inpod-repair", "inpod-repair"),
    ("inpod-leave", "inpod-leave"),
    ("inpod-privileged", "pod-events"),
    ("inpod-privileged", "inpod-leave"),
];
