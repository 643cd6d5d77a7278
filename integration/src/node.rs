mod many;
mod processes;
mod sandboxes;
mod waiting;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::Child,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::Context as _;
use inpod_linux::Netns;

use crate::{
    Api, ApiServer, guard,
    pod::{exec_in, make_netns},
    run,
};

pub const SERVICES: [&str; 3] = ["netconfig", "ztunnel-broker", "pod-events"];

/// Numbers the nodes and sandboxes of one process, so that tests can run in parallel.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// A network namespace with a bridge, a directory, and the processes of a node.
#[derive(Debug)]
pub struct Node {
    name: String,
    dir: PathBuf,
    netns: Netns,
    api: Api,
    processes: RefCell<BTreeMap<String, Child>>,
    next_address: Cell<u16>,
    bridges: Cell<u16>,
    keep: Cell<bool>,
    /// The flags of pod-events that select its source of pods.
    pods_from: Vec<String>,
}

impl Node {
    /// Creates a node with its bridge, but without processes.
    pub fn new() -> anyhow::Result<Self> {
        guard()?;
        let name = format!(
            "node-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        // The path is short because the path of a socket has at most 107 bytes, and in memory.
        let dir = PathBuf::from("/run").join(&name);
        for part in ["pods", "log", "plugin"] {
            fs::create_dir_all(dir.join(part))
                .with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let netns = make_netns(&name)?;
        for command in [
            &["ip", "link", "add", "cni0", "type", "bridge"][..],
            &["ip", "addr", "add", "10.77.0.1/16", "dev", "cni0"],
            &["ip", "addr", "add", "fd77::1/64", "dev", "cni0", "nodad"],
            &["ip", "link", "set", "cni0", "up"],
        ] {
            exec_in(netns.path(), command)?;
        }
        fs::write(
            dir.join("pods/namespaces.yaml"),
            "kind: Namespace\nmetadata: {name: shop}\n",
        )?;
        let api = Api::new(&dir.join("inpod"))?;
        let pods_from = format!("--pods-from=dir:{}", dir.join("pods").display());
        Ok(Self {
            pods_from: vec![pods_from],
            name,
            dir,
            netns,
            api,
            processes: RefCell::default(),
            next_address: Cell::new(2),
            bridges: Cell::new(1),
            keep: Cell::new(false),
        })
    }

    pub fn of_cluster(server: &ApiServer) -> anyhow::Result<Self> {
        let mut node = Self::new()?;
        server.plug(&node.netns)?;
        let kubeconfig = node.dir.join("kubeconfig");
        fs::write(&kubeconfig, server.kubeconfig(&node.name)?)?;
        node.pods_from = vec![
            "--pods-from=kubernetes".to_owned(),
            format!("--kubeconfig={}", kubeconfig.display()),
        ];
        Ok(node)
    }

    /// Creates a node and starts all services; returns when ztunnel is up to date and every service is ready.
    pub fn running() -> anyhow::Result<Self> {
        let node = Self::new()?;
        node.start_all()?;
        node.ready()?;
        // netconfig serves before its preflight has ended, so pod-events can be ready first.
        SERVICES
            .iter()
            .try_for_each(|service| node.healthy(service))?;
        Ok(node)
    }

    pub fn start_all(&self) -> anyhow::Result<()> {
        SERVICES
            .iter()
            .try_for_each(|service| self.start(service))?;
        self.start_ztunnel(&[])
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("inpod")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("plugin")
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    pub fn manifests(&self) -> PathBuf {
        self.dir.join("pods")
    }

    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Keeps the node: a drop then leaves everything in place.
    pub fn keep(&self) {
        self.keep.set(true);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for process in SERVICES.iter().chain(&["ztunnel"]) {
                eprint_tail(process, &self.tail(process, 40));
            }
        }
        if self.keep.get() {
            return;
        }
        for child in self.processes.borrow_mut().values_mut() {
            // The kill fails if the process has ended already.
            child.kill().unwrap_or_default();
            child.wait().map(drop).unwrap_or_default();
        }
        run("ip", &["netns", "del", &self.name])
            .map(drop)
            .unwrap_or_default();
        fs::remove_dir_all(&self.dir).unwrap_or_default();
    }
}

#[expect(
    clippy::print_stderr,
    reason = "what a failed test leaves behind for its reader"
)]
fn eprint_tail(process: &str, tail: &str) {
    eprintln!("--- {process}\n{tail}");
}
