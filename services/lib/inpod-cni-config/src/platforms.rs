//! Where platforms keep their CNI directories, for those that no runtime configuration tells.

/// A platform's directories. Sources: the platform files of Istio's chart `istio-cni` 1.32 where they are named; the
/// platforms' own documentation otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// As in the chart's `platform`.
    pub name: &'static str,
    /// Network configurations.
    pub conf_dir: &'static str,
    /// Plugins.
    pub bin_dir: &'static str,
    /// Where that is written.
    pub source: &'static str,
}

/// The platforms whose directories are known. Where a platform is not here, the defaults hold (EKS, AKS, kind, Talos).
pub const PLATFORMS: &[Platform] = &[
    Platform {
        name: "default",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/opt/cni/bin",
        source: "defaults of containerd and CRI-O",
    },
    Platform {
        name: "gke",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/home/kubernetes/bin",
        source: "istio-cni, platform gke; /opt/cni/bin is read-only there",
    },
    Platform {
        name: "k3d",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        bin_dir: "/bin",
        source: "istio-cni, platform k3d",
    },
    Platform {
        name: "k3s",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        bin_dir: "/var/lib/rancher/k3s/data/cni",
        source: "istio-cni, platform k3s",
    },
    Platform {
        name: "microk8s",
        conf_dir: "/var/snap/microk8s/current/args/cni-network",
        bin_dir: "/var/snap/microk8s/current/opt/cni/bin",
        source: "istio-cni, platform microk8s",
    },
    Platform {
        name: "minikube",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/opt/cni/bin",
        source: "istio-cni, platform minikube; with the docker driver its netns are in /var/run/docker/netns",
    },
    Platform {
        name: "openshift",
        conf_dir: "/etc/cni/multus/net.d",
        bin_dir: "/var/lib/cni/bin",
        source: "istio-cni, platform openshift: standalone, Multus calls it",
    },
];

impl Platform {
    /// The platform of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PLATFORMS.iter().find(|platform| platform.name == name)
    }
}
