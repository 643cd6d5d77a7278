use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use inpod_linux::Netns;
use nix::sched::{CloneFlags, unshare};

use crate::{TIMEOUT, eventually, run};

#[derive(Clone, Debug)]
pub struct Spec {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub mode: Option<String>,
    pub runtime_class: Option<&'static str>,
    /// The addresses of the pod; none before the pod runs.
    pub addresses: Vec<IpAddr>,
    /// The annotation of the pod declares the pod as redirected.
    pub is_redirected: bool,
    /// Further labels, name and value.
    pub labels: Vec<(&'static str, String)>,
    /// Further annotations, name and value.
    pub annotations: Vec<(&'static str, String)>,
    /// Further containers, in YAML.
    pub containers: Vec<String>,
    /// Init containers, in YAML.
    pub init_containers: Vec<String>,
}

/// Istio's injected sidecar, except for the name.
const SIDECAR: &str =
    "image: proxyv2, args: [proxy, sidecar], securityContext: {runAsUser: 1337, runAsGroup: 1337}";

fn lines(all: &[(&str, String)]) -> String {
    let line = |(name, value): &(&str, String)| format!("\n    {name}: {value:?}");
    all.iter().map(line).collect()
}

impl Spec {
    /// Creates a pod in the namespace `shop`, without labels.
    pub fn new(name: &str) -> Self {
        Self {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: format!("{name}-0000-1111-2222-333333333333"),
            mode: None,
            runtime_class: None,
            addresses: Vec::new(),
            is_redirected: false,
            labels: Vec::new(),
            annotations: Vec::new(),
            containers: Vec::new(),
            init_containers: Vec::new(),
        }
    }

    #[must_use]
    pub fn injected(mut self) -> Self {
        self.containers
            .push(format!("{{name: istio-proxy, {SIDECAR}}}"));
        self.annotated("sidecar.istio.io/status", "{}")
    }

    #[must_use]
    pub fn injected_natively(mut self) -> Self {
        let sidecar = format!("{{name: istio-proxy, {SIDECAR}, restartPolicy: Always}}");
        self.init_containers.push(sidecar);
        self.annotated("sidecar.istio.io/status", "{}")
    }

    #[must_use]
    pub fn label(mut self, name: &'static str, value: &str) -> Self {
        self.labels.push((name, value.to_owned()));
        self
    }

    #[must_use]
    pub fn annotate(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.push((name, value.to_owned()));
        self
    }

    #[must_use]
    pub fn ambient(self) -> Self {
        Self {
            mode: Some("ambient".to_owned()),
            ..self
        }
    }

    #[must_use]
    pub fn of_runtime(self, class: &'static str) -> Self {
        Self {
            runtime_class: Some(class),
            ..self
        }
    }

    #[must_use]
    pub fn annotated(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.retain(|(known, _)| *known != name);
        self.annotations.push((name, value.to_owned()));
        self
    }

    pub fn manifest(&self, node: &str) -> String {
        let Self {
            namespace,
            name,
            uid,
            mode,
            runtime_class,
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
        let class = runtime_class.map(|class| format!("\n  runtimeClassName: {class}"));
        let class = class.unwrap_or_default();
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
             app: {name}{label}{annotation}\nspec:\n  nodeName: {node}\n  serviceAccountName: sa-{name}{class}{init}\n  containers:\n  - name: app\n    \
             image: app{containers}\nstatus:\n  phase: Running{addresses}\n"
        )
    }
}

/// The network namespace of a pod, as a CNI chain leaves it.
#[derive(Debug)]
pub struct Pod {
    pub spec: Spec,
    pub container_id: String,
    pub netns: Netns,
    pub veth: String,
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Pod {
    pub fn addresses(&self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    pub fn path(&self) -> &Path {
        self.netns.path()
    }

    pub fn exec(&self, command: &[&str]) -> anyhow::Result<String> {
        exec_in(self.path(), command)
    }

    /// Waits until the kernel has checked that the addresses of the pod are unique, because the kernel adds routes
    /// until then.
    pub fn until_addresses_are_checked(&self) -> anyhow::Result<()> {
        eventually("the addresses are checked", TIMEOUT, || {
            let tentative = self.exec(&["ip", "-6", "addr", "show", "tentative"])?;
            anyhow::ensure!(tentative.is_empty(), "{tentative}");
            Ok(())
        })
    }

    pub fn ruleset(&self) -> anyhow::Result<String> {
        self.exec(&["nft", "list", "ruleset"])
    }

    /// Returns all traces of inpod in the netns, one per line: tables, ip rules and routes.
    pub fn traces(&self) -> anyhow::Result<Vec<String>> {
        let commands: [&[&str]; 5] = [
            &["nft", "list", "tables"],
            &["ip", "rule"],
            &["ip", "-6", "rule"],
            &["ip", "route", "show", "table", "all"],
            &["ip", "-6", "route", "show", "table", "all"],
        ];
        let mut traces = Vec::new();
        for command in commands {
            let text = self.exec(command)?;
            let is_own = |line: &&str| command.contains(&"nft") || line.contains("proto 105");
            traces.extend(text.lines().filter(is_own).map(str::to_owned));
        }
        Ok(traces)
    }

    /// Removes the netns, like a runtime after DEL.
    pub fn unmount(&self) -> anyhow::Result<()> {
        let name = self.path().file_name().context("a netns has a name")?;
        run("ip", &["netns".as_ref(), "del".as_ref(), name]).map(drop)
    }
}

pub(crate) fn exec_in(netns: &Path, command: &[&str]) -> anyhow::Result<String> {
    let net = format!("--net={}", netns.display());
    let arguments: Vec<&str> = std::iter::once(net.as_str())
        .chain(command.iter().copied())
        .collect();
    run("nsenter", &arguments)
}

/// Creates a netns with `ip netns add`, and opens the netns.
pub(crate) fn make_netns(name: &str) -> anyhow::Result<Netns> {
    run("ip", &["netns", "add", name])?;
    let path = PathBuf::from("/run/netns").join(name);
    // Runtimes bring `lo` up before they call CNI.
    exec_in(&path, &["ip", "link", "set", "lo", "up"])?;
    Ok(Netns::open(&path, &["/run/netns".into()])?)
}

/// Moves the thread into a new nameless network namespace, for benchmarks that need many namespaces.
pub fn fresh_netns() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")
}
