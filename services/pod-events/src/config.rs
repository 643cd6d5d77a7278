use std::{
    net::SocketAddr,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use inpod_service::Key;
use inpod_types::{NamespaceName, NodeName, keys, redirection::Ipv6};
use serde::Deserialize;

use crate::{
    decide::{ClassPattern, Policy, SANDBOXED_RUNTIME_CLASSES, Selectors},
    labels::{Selector, TaintKey},
    redirection::{Capture, Group, NodeLoopback, OwnerGroups, Permission, Permissions},
};

pub const KEYS: &[Key] = &[
    Key {
        name: "node_name",
        default: None,
        help: "This node's name in Kubernetes",
    },
    Key {
        name: "pods_from",
        default: None,
        help: "Where pods come from: kubernetes, or dir:PATH, a directory of Pod and Namespace manifests",
    },
    Key {
        name: "kubeconfig",
        default: Some(""),
        help: "Kubeconfig file for pods_from=kubernetes; empty: the pod's service account",
    },
    Key {
        name: "exclude_namespaces",
        default: Some(""),
        help: "Namespaces whose pods are never enrolled",
    },
    Key {
        name: "enablement_selectors",
        default: Some(keys::ISTIO_SELECTORS),
        help: "Which pods join the mesh: YAML or JSON, a list of {podSelector, namespaceSelector} with Kubernetes LabelSelectors; a pod joins if both selectors of any entry match, and a selector that is left out matches everything",
    },
    Key {
        name: "sandboxed_runtime_classes",
        default: Some(SANDBOXED_RUNTIME_CLASSES),
        help: "RuntimeClasses of gVisor, Kata and the like, separated by commas, with * at the end for all names that begin so: their pods are never enrolled, because redirection in the pod's network namespace does not reach their network stack; empty: none",
    },
    Key {
        name: "pods_may",
        default: Some(""),
        help: "What any pod may request by its annotations although the traffic then bypasses ztunnel: exclude, keep-existing, separated by commas; a namespace's annotation inpod.io/allow permits more to its pods",
    },
    Key {
        name: "dns_capture",
        default: Some("false"),
        help: "Whether DNS of pods is redirected to ztunnel (true or false); a pod's annotation ambient.istio.io/dns-capture overrides it",
    },
    Key {
        name: "ipv6_capture",
        default: Some("auto"),
        help: "Whether IPv6 of pods is captured: auto (if a pod has it), on (pods without it are refused) or off",
    },
    Key {
        name: "sidecar_redirection",
        default: Some("true"),
        help: "Whether the traffic of pods with an injected Istio sidecar is redirected to it (true or false); an existing redirection stays until the sandbox ends",
    },
    Key {
        name: "sidecar_owner_groups",
        default: Some("*"),
        help: "Group ids whose outbound traffic is captured in pods with a sidecar, separated by commas, or * for all",
    },
    Key {
        name: "sidecar_excluded_owner_groups",
        default: Some(""),
        help: "Group ids whose outbound traffic is not captured in pods with a sidecar, separated by commas",
    },
    Key {
        name: "sidecar_loopback_network",
        default: Some("127.0.0.1/32"),
        help: "The part of 127.0.0.0/8 that is a pod's own loopback and not captured in pods with a sidecar; it may not contain 127.0.0.6",
    },
    Key {
        name: "propagation_wait_seconds",
        default: Some("5"),
        help: "How long a pod that leaves the mesh stays redirected, so that its peers learn of it first",
    },
    Key {
        name: "drain_grace_seconds",
        default: Some("60"),
        help: "How long captured connections of a pod that leaves the mesh may continue",
    },
    Key {
        name: "listener_check_seconds",
        default: Some("60"),
        help: "Mean interval of the checks that connections of each pod reach ztunnel, on a node with up to 10 pods; it grows with their number, but the first check follows within 25 s; 0 disables the checks",
    },
    Key {
        name: "ready_needs_ztunnel",
        default: Some("false"),
        help: "Whether pod-events is ready only while a ztunnel is connected and up to date (true or false)",
    },
    Key {
        name: "startup_taints",
        default: Some(""),
        help: "Keys of taints with which nodes start, separated by commas, for example inpod.io/not-ready: pod-events removes these taints from its Node once pod-events, netconfig and the installer are ready; empty: none, and the Node is not read",
    },
    Key {
        name: "plugin_state_dir",
        default: Some("/var/lib/inpod/plugin"),
        help: "The plugin's stateDir, with what it spools while pod-events is away and the lists that it reads then",
    },
    Key {
        name: "ztunnel_pods",
        default: Some("istio-system/app=ztunnel"),
        help: "The ztunnel pods, as NAMESPACE/LABEL=VALUE: ztunnel-broker serves those of this node and no other process",
    },
    Key {
        name: "metrics_address",
        default: Some("127.0.0.1:15014"),
        help: "Address of the HTTP endpoint /metrics with the metrics of all services of the node; empty disables it",
    },
    Key {
        name: "leave_file",
        default: Some("/etc/inpod/leave/mode"),
        help: "File that requests inpod to leave the node: uninstall (withdraws every pod) or handover (leaves everything to another agent); an empty file requests that it stays; a missing file changes nothing",
    },
    Key {
        name: "receipt_file",
        default: Some("/dev/termination-log"),
        help: "File for the one-line receipt of a completed uninstall or handover",
    },
    Key {
        name: "max_adds",
        default: Some("32"),
        help: "How many ADDs of pods of the mesh are processed at once; the others wait, earliest deadline first",
    },
];

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub node_name: NodeName,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub pods_from: PodsFrom,
    kubeconfig: PathBuf,
    #[serde(deserialize_with = "inpod_service::list")]
    pub exclude_namespaces: Vec<NamespaceName>,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub enablement_selectors: Selectors,
    #[serde(deserialize_with = "inpod_service::list")]
    sandboxed_runtime_classes: Vec<ClassPattern>,
    #[serde(deserialize_with = "inpod_service::list")]
    pods_may: Vec<Permission>,
    dns_capture: bool,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    ipv6_capture: Ipv6,
    sidecar_redirection: bool,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    sidecar_owner_groups: OwnerGroups,
    #[serde(deserialize_with = "inpod_service::list")]
    sidecar_excluded_owner_groups: Vec<Group>,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    sidecar_loopback_network: NodeLoopback,
    propagation_wait_seconds: u32,
    drain_grace_seconds: u32,
    listener_check_seconds: u32,
    pub ready_needs_ztunnel: bool,
    #[serde(deserialize_with = "inpod_service::list")]
    pub startup_taints: Vec<TaintKey>,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub plugin_state_dir: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::parsed")]
    pub ztunnel_pods: Selector,
    #[serde(deserialize_with = "inpod_service::config::optional_address")]
    pub metrics_address: Option<SocketAddr>,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub leave_file: PathBuf,
    #[serde(deserialize_with = "inpod_service::config::absolute")]
    pub receipt_file: PathBuf,
    pub max_adds: NonZeroUsize,
}

impl Config {
    pub fn kubeconfig(&self) -> Option<&Path> {
        let is_given = !self.kubeconfig.as_os_str().is_empty();
        is_given.then_some(&self.kubeconfig)
    }

    pub fn policy(&self) -> Policy<'_> {
        Policy {
            selectors: &self.enablement_selectors,
            excluded: &self.exclude_namespaces,
            sandboxed: &self.sandboxed_runtime_classes,
            pods_may: self.pods_may(),
            sidecars: self.sidecar_redirection,
            is_uninstalling: false,
        }
    }

    pub fn pods_may(&self) -> Permissions {
        Permissions::from(&*self.pods_may)
    }

    /// Returns the node-wide part of every redirection.
    pub fn capture(&self) -> Capture {
        Capture {
            dns: self.dns_capture,
            ipv6: self.ipv6_capture,
            owner_groups: self.sidecar_owner_groups.clone(),
            excluded_owner_groups: self.sidecar_excluded_owner_groups.clone(),
            loopback: self.sidecar_loopback_network,
        }
    }

    pub fn propagation_wait(&self) -> Duration {
        Duration::from_secs(self.propagation_wait_seconds.into())
    }

    /// Returns the mean interval of listener checks; `None` disables them.
    pub fn listener_check(&self) -> Option<Duration> {
        let seconds = self.listener_check_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    pub fn drain_grace(&self) -> Duration {
        Duration::from_secs(self.drain_grace_seconds.into())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodsFrom {
    Kubernetes,
    Directory(PathBuf),
}

impl FromStr for PodsFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("dir", path)) if path.starts_with('/') => Ok(Self::Directory(path.into())),
            None if text == "kubernetes" => Ok(Self::Kubernetes),
            Some(_) | None => Err(format!(
                "setting pods_from: \"{text}\" is neither kubernetes nor dir:/PATH with an absolute path"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_come_from_kubernetes_or_from_a_directory_and_the_error_names_both() {
        assert_eq!("kubernetes".parse(), Ok(PodsFrom::Kubernetes));
        assert_eq!("dir:/pods".parse(), Ok(PodsFrom::Directory("/pods".into())));
        for text in ["", "Kubernetes", "kubernetes:", "dir:pods", "/pods"] {
            let error = text.parse::<PodsFrom>().unwrap_err();
            assert!(
                ["pods_from", "kubernetes", "dir:/PATH", text]
                    .iter()
                    .all(|word| error.contains(word)),
                "{error}"
            );
        }
    }
}
