use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use inpod_linux::Netns;
use nix::sched::{CloneFlags, unshare};

use crate::run;

/// What a manifest says of a pod.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The value of its label `istio.io/dataplane-mode`.
    pub mode: Option<String>,
    /// Its addresses, as far as its status shows them: none before it runs.
    pub addresses: Vec<IpAddr>,
    /// Whether its annotation says that its traffic is redirected.
    pub is_redirected: bool,
    /// Further labels, name and value.
    pub labels: Vec<(&'static str, String)>,
    /// Further annotations, name and value.
    pub annotations: Vec<(&'static str, String)>,
    /// Its containers besides the application, in YAML.
    pub containers: Vec<String>,
    /// Its containers that run before, in YAML.
    pub init_containers: Vec<String>,
}

/// A sidecar as Istio injects it, but for its name.
const SIDECAR: &str =
    "image: proxyv2, args: [proxy, sidecar], securityContext: {runAsUser: 1337, runAsGroup: 1337}";

/// As lines of a manifest's map.
fn lines(all: &[(&str, String)]) -> String {
    let line = |(name, value): &(&str, String)| format!("\n    {name}: {value:?}");
    all.iter().map(line).collect()
}

impl Spec {
    /// A pod of the namespace `shop` without labels.
    pub fn new(name: &str) -> Self {
        Self {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: format!("{name}-0000-1111-2222-333333333333"),
            mode: None,
            addresses: Vec::new(),
            is_redirected: false,
            labels: Vec::new(),
            annotations: Vec::new(),
            containers: Vec::new(),
            init_containers: Vec::new(),
        }
    }

    /// The same pod with a sidecar, as an injector leaves it.
    #[must_use]
    pub fn injected(mut self) -> Self {
        self.containers
            .push(format!("{{name: istio-proxy, {SIDECAR}}}"));
        self.annotated("sidecar.istio.io/status", "{}")
    }

    /// The same pod with a native sidecar.
    #[must_use]
    pub fn injected_natively(mut self) -> Self {
        let sidecar = format!("{{name: istio-proxy, {SIDECAR}, restartPolicy: Always}}");
        self.init_containers.push(sidecar);
        self.annotated("sidecar.istio.io/status", "{}")
    }

    /// The same pod with one more label.
    #[must_use]
    pub fn label(mut self, name: &'static str, value: &str) -> Self {
        self.labels.push((name, value.to_owned()));
        self
    }

    /// The same pod with one more annotation.
    #[must_use]
    pub fn annotate(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.push((name, value.to_owned()));
        self
    }

    /// The same pod, labelled.
    #[must_use]
    pub fn ambient(self) -> Self {
        Self {
            mode: Some("ambient".to_owned()),
            ..self
        }
    }

    /// The same pod with an annotation.
    #[must_use]
    pub fn annotated(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.retain(|(known, _)| *known != name);
        self.annotations.push((name, value.to_owned()));
        self
    }

    /// The manifest, as kubectl writes it.
    pub fn manifest(&self, node: &str) -> String {
        let Self {
            namespace,
            name,
            uid,
            mode,
            addresses,
            is_redirected,
            labels,
            annotations,
            containers,
            init_containers,
        } = self;
        let label: String = mode
            .as_ref()
            .map(|mode| format!("\n    istio.io/dataplane-mode: {mode}"))
            .unwrap_or_default();
        let label = label + &lines(labels);
        let mut annotations = lines(annotations);
        if *is_redirected {
            annotations += "\n    ambient.istio.io/redirection: enabled";
        }
        let annotation = if annotations.is_empty() {
            annotations
        } else {
            format!("\n  annotations:{annotations}")
        };
        let items = |all: &[String]| {
            let items = all.iter().map(|one| format!("\n  - {one}"));
            items.collect::<String>()
        };
        let containers = items(containers);
        let init = if init_containers.is_empty() {
            String::new()
        } else {
            format!("\n  initContainers:{}", items(init_containers))
        };
        let addresses = addresses
            .iter()
            .map(|address| format!("\n  - ip: \"{address}\""));
        let addresses: String = addresses.collect();
        let addresses = if addresses.is_empty() {
            addresses
        } else {
            format!("\n  podIPs:{addresses}")
        };
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: {namespace}\n  uid: {uid}\n  labels:\n    \
             app: {name}{label}{annotation}\nspec:\n  nodeName: {node}\n  serviceAccountName: sa-{name}{init}\n  containers:\n  - name: app\n    \
             image: app{containers}\nstatus:\n  phase: Running{addresses}\n"
        )
    }
}

/// A sandbox: a network namespace as a CNI chain leaves it.
#[derive(Debug)]
pub struct Pod {
    /// The pod it is of.
    pub spec: Spec,
    /// The container's id.
    pub container_id: String,
    /// The network namespace.
    pub netns: Netns,
    /// The host side of its veth.
    pub veth: String,
    /// Its address.
    pub v4: Ipv4Addr,
    /// Its other address.
    pub v6: Ipv6Addr,
}

impl Pod {
    /// Both addresses.
    pub fn addresses(&self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Where the netns is.
    pub fn path(&self) -> &Path {
        self.netns.path()
    }

    /// Runs a command in the pod's netns.
    ///
    /// # Errors
    ///
    /// When it fails.
    pub fn exec(&self, command: &[&str]) -> anyhow::Result<String> {
        exec_in(self.path(), command)
    }

    /// The rules in the pod's netns, as nft prints them.
    ///
    /// # Errors
    ///
    /// When nft fails.
    pub fn ruleset(&self) -> anyhow::Result<String> {
        self.exec(&["nft", "list", "ruleset"])
    }

    /// Everything of inpod's that is in the pod's netns: tables, ip rules and routes, a line each.
    ///
    /// # Errors
    ///
    /// When a command fails.
    pub fn traces(&self) -> anyhow::Result<Vec<String>> {
        let commands: [&[&str]; 5] = [
            &["nft", "list", "tables"],
            &["ip", "rule", "list", "pref", "32764"],
            &["ip", "-6", "rule", "list", "pref", "32764"],
            &["ip", "route", "show", "table", "100"],
            &["ip", "-6", "route", "show", "table", "100"],
        ];
        let mut traces = Vec::new();
        for command in commands {
            // A routing table that never had a route does not exist, which ip calls an error.
            let text = self.exec(command).or_else(|error| {
                if command.contains(&"100") {
                    Ok(String::new())
                } else {
                    Err(error)
                }
            })?;
            traces.extend(text.lines().map(str::to_owned));
        }
        Ok(traces)
    }

    /// What the runtime does after DEL.
    ///
    /// # Errors
    ///
    /// When ip fails.
    pub fn unmount(&self) -> anyhow::Result<()> {
        let name = self.path().file_name().context("a netns has a name")?;
        run("ip", &["netns".as_ref(), "del".as_ref(), name]).map(drop)
    }
}

/// Runs a command in a netns.
pub(crate) fn exec_in(netns: &Path, command: &[&str]) -> anyhow::Result<String> {
    let net = format!("--net={}", netns.display());
    let arguments: Vec<&str> = std::iter::once(net.as_str())
        .chain(command.iter().copied())
        .collect();
    run("nsenter", &arguments)
}

/// Makes a network namespace with a name, as `ip netns add` does, and opens it.
pub(crate) fn make_netns(name: &str) -> anyhow::Result<Netns> {
    run("ip", &["netns", "add", name])?;
    let path = PathBuf::from("/run/netns").join(name);
    // `lo` is up in every pod: runtimes see to it before CNI.
    exec_in(&path, &["ip", "link", "set", "lo", "up"])?;
    Ok(Netns::open(&path, &["/run/netns".into()])?)
}

/// Puts the current thread into a network namespace without a name. For benchmarks that need many.
///
/// # Errors
///
/// Without the right to.
pub fn fresh_netns() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")
}
