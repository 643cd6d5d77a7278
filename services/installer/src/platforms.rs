//! The directories of known platforms, for nodes whose runtime configuration sets no CNI directories.

/// A platform, from the platform files of Istio's chart `istio-cni` 1.32 or else from the platform's documentation.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// The value of `platform` in Istio's chart.
    pub name: &'static str,
    pub conf_dir: &'static str,
    pub bin_dir: &'static str,
}

/// The platforms with directories of their own; others have the defaults (EKS, AKS, kind, Talos).
pub const PLATFORMS: &[Platform] = &[
    // containerd and CRI-O have these defaults.
    Platform {
        name: "default",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/opt/cni/bin",
    },
    // /opt/cni/bin is read-only there.
    Platform {
        name: "gke",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/home/kubernetes/bin",
    },
    Platform {
        name: "k3d",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        bin_dir: "/bin",
    },
    Platform {
        name: "k3s",
        conf_dir: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
        bin_dir: "/var/lib/rancher/k3s/data/cni",
    },
    Platform {
        name: "microk8s",
        conf_dir: "/var/snap/microk8s/current/args/cni-network",
        bin_dir: "/var/snap/microk8s/current/opt/cni/bin",
    },
    // With the docker driver, network namespaces are in /var/run/docker/netns.
    Platform {
        name: "minikube",
        conf_dir: "/etc/cni/net.d",
        bin_dir: "/opt/cni/bin",
    },
    // Multus calls the plugin, which stands alone.
    Platform {
        name: "openshift",
        conf_dir: "/etc/cni/multus/net.d",
        bin_dir: "/var/lib/cni/bin",
    },
];

impl Platform {
    pub fn named(name: &str) -> Option<&'static Self> {
        PLATFORMS.iter().find(|platform| platform.name == name)
    }
}
