//! Writes the configuration files of the node's programs.

use std::{fs, path::Path};

use anyhow::Context as _;

use super::node::{Chain, NodeConfig};
use crate::{ApiServer, tool};

pub(super) const NETWORK: &str = "podnet";

/// The plugin directory of Debian's package containernetworking-plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// kube-proxy's configuration. Writes to the host's connection tracking fail in a network namespace, hence the zeros.
const KUBE_PROXY: &str = "\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: /srv/kube-proxy.kubeconfig}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
";

/// The kubelet's configuration, which ignores swap and a nearly full disk. Without systemd the kubelet creates the
/// cgroups itself. Pods see a changed ConfigMap within this period (default: 1 min).
const KUBELET: &str = "\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupsPerQOS: true
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
nodeStatusUpdateFrequency: 1s
syncFrequency: 5s
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
staticPodPath: /etc/kubernetes/manifests
fileCheckFrequency: 1s
resolvConf: /srv/resolv.conf
clusterDomain: cluster.local
clusterDNS: [10.79.0.10]
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: '0%', nodefs.available: '0%', nodefs.inodesFree: '0%', imagefs.available: '0%'}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
localStorageCapacityIsolation: false
";

/// containerd 1.6 to 2.x read version 2. If the machine may not lower the oom score of a process, runc may not do so
/// either.
const CONTAINERD: &str = r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "/opt/containerd"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "inpod.test/busybox:1"
disable_apparmor = true
restrict_oom_score_adj = true
"#;

/// A script that starts the node's programs and restarts each program that ends.
const INIT: &str = r#"
mkdir -p /run/netns /run/flannel /etc/kubernetes/manifests
cp /srv/subnet.env /run/flannel/
while :; do containerd --config /etc/containerd/config.toml >>/srv/log/containerd.log 2>&1; sleep 0.2; done &
until [ -S /run/containerd/containerd.sock ]; do sleep 0.05; done
for image in /srv/images/*.tar; do
  [ ! -e "$image" ] || { ctr -n k8s.io images import "$image" && rm "$image"; }
done
while :; do
  "$1" --config=/srv/kubelet.yaml --kubeconfig=/srv/kubeconfig --hostname-override="$2" --node-ip="$3" >>/srv/log/kubelet.log 2>&1
  sleep 0.2
done &
while :; do
  "$4" --config=/srv/kube-proxy.yaml >>/srv/log/kube-proxy.log 2>&1
  sleep 0.2
done &
wait
"#;

pub(super) fn write(server: &ApiServer, dir: &Path, node: &NodeConfig) -> anyhow::Result<()> {
    for part in [
        "run",
        "var/lib",
        "var/log",
        "opt/cni/bin",
        "etc/cni/net.d",
        "etc/containerd",
        "log",
        "images",
    ] {
        fs::create_dir_all(dir.join(part))?;
    }
    fs::copy(server.authority(), dir.join("ca.crt"))?;
    let kubeconfig = ApiServer::kubeconfig_of(&node.name(), "/srv/ca.crt");
    let proxy_kubeconfig = ApiServer::kubeconfig_of("kube-proxy", "/srv/ca.crt");
    let kube_proxy = format!(
        "{KUBE_PROXY}mode: {}\nhostnameOverride: {}\n",
        node.proxy.mode(),
        node.name()
    );
    let texts: [(&str, &str); 9] = [
        ("kubelet.yaml", KUBELET),
        ("etc/containerd/config.toml", CONTAINERD),
        ("init.sh", INIT),
        ("resolv.conf", ""),
        ("node.sh", include_str!("node.sh")),
        ("kubeconfig", &kubeconfig),
        ("kube-proxy.kubeconfig", &proxy_kubeconfig),
        ("kube-proxy.yaml", &kube_proxy),
        ("subnet.env", &node.flannel()),
    ];
    texts
        .iter()
        .try_for_each(|(name, text)| fs::write(dir.join(name), text))?;
    let plugins = dir.join("opt/cni/bin");
    for plugin in [
        "bridge",
        "host-local",
        "portmap",
        "loopback",
        "ptp",
        "bandwidth",
    ] {
        let from = Path::new(PLUGINS).join(plugin);
        fs::copy(&from, plugins.join(plugin)).context("install containernetworking-plugins")?;
    }
    if node.chain == Chain::Flannel {
        fs::copy(tool("FLANNEL")?, plugins.join("flannel"))?;
    }
    primary(&dir.join("etc"), node)
}

pub(super) const PRIMARY: &str = "cni/net.d/10-podnet.conflist";

/// Writes the primary network configuration, and renames the file into place because runtimes watch the directory.
/// `etc` is the view of the running machine: inotify does not report writes below an overlay.
pub(super) fn primary(etc: &Path, node: &NodeConfig) -> anyhow::Result<()> {
    // containerd 1.6 notices a file that leaves the directory, but not a file that is moved in from elsewhere.
    let aside = etc.join("cni/net.d/.podnet");
    fs::write(&aside, node.list().to_string())?;
    Ok(fs::rename(aside, etc.join(PRIMARY))?)
}

/// Returns the arguments after `node.sh NAME DIR`.
pub(super) fn init(node: &NodeConfig) -> anyhow::Result<Vec<String>> {
    let program = |variable| anyhow::Ok(tool(variable)?.display().to_string());
    Ok(vec![
        "sh".to_owned(),
        "/srv/init.sh".to_owned(),
        program("KUBELET")?,
        node.name(),
        node.addresses().join(","),
        program("KUBE_PROXY")?,
    ])
}
