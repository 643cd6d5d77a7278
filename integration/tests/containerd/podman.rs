//! podman's CNI backend probes VERSION and names containers as pods without a namespace.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use anyhow::ensure;
use inpod_linux::Netns;
use inpod_proto::podevents::v1::PodState;
use integration::{App, Node, Spec, TIMEOUT, ask, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    PORT,
    chain::{Chain, NETWORK, spooled, veths, within},
    image,
    runtime::{end, isolated, remove_cgroups},
};

/// Mounts what podman may change, signals readiness, and lives as long as its containers.
const INIT: &str = r#"mount -t tmpfs tmpfs /var/lib && touch "$0" && exec sleep infinity"#;

/// A node with podman, its configuration and its storage.
struct Podman {
    /// Containers and monitors live in its pid namespace.
    init: Child,
    dir: PathBuf,
    chain: Chain,
    node: Node,
}

impl Podman {
    fn running(keys: &[(&str, Value)]) -> Self {
        let node = Node::running().unwrap();
        let dir = node.manifests().with_file_name("podman");
        fs::create_dir(&dir).unwrap();
        let chain = Chain::install(&node, &dir).unwrap();
        chain.configure(keys).unwrap();
        let archive = image::write(&dir).unwrap();
        fs::write(dir.join("containers.conf"), containers_conf(&chain)).unwrap();
        fs::write(dir.join("storage.conf"), storage_conf(&dir)).unwrap();
        let there = dir.join("there");
        let mut init = isolated(&node);
        let init = init.args(["sh", "-c", INIT]).arg(&there).spawn().unwrap();
        let podman = Self {
            init,
            dir,
            chain,
            node,
        };
        eventually("podman's namespaces are there", TIMEOUT, || {
            ensure!(there.exists(), "they are not");
            anyhow::Ok(())
        })
        .unwrap();
        podman.done(&["pull", "-q", &format!("oci-archive:{}", archive.display())]);
        podman
    }

    fn done(&self, arguments: &[&str]) -> String {
        let (succeeded, text) = self.call(arguments);
        assert!(succeeded, "podman {arguments:?}: {text}");
        text.trim().to_owned()
    }

    /// Runs it in its own namespaces; returns success and output.
    fn call(&self, arguments: &[&str]) -> (bool, String) {
        let ns = PathBuf::from(format!("/proc/{}/ns", self.init.id()));
        let mut command = Command::new("nsenter");
        for (flag, name) in [
            ("net", "net"),
            ("mount", "mnt"),
            ("pid", "pid_for_children"),
        ] {
            command.arg(format!("--{flag}={}", ns.join(name).display()));
        }
        command.arg("podman").args(arguments).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("CONTAINERS_CONF", self.dir.join("containers.conf"));
        command.env("CONTAINERS_STORAGE_CONF", self.dir.join("storage.conf"));
        let output = command.output().unwrap();
        let succeeded = output.status.success();
        let text = if succeeded {
            output.stdout
        } else {
            output.stderr
        };
        (succeeded, String::from_utf8_lossy(&text).into_owned())
    }

    /// Runs `podman run` with a container that does nothing.
    fn run(&self, name: &[&str]) -> (bool, String) {
        let parent = format!("--cgroup-parent=/{}", self.node.name());
        self.call(&[&["run", "-d", &parent], name, &[image::NAME]].concat())
    }

    /// Expects address and veth pair gone.
    fn removed(&self, container: &str) {
        self.done(&["rm", "-f", "-t", "0", container]);
        assert!(self.chain.addresses().unwrap().is_empty());
        assert!(veths(&self.node).unwrap().is_empty());
    }

    fn inspected(&self, container: &str, what: &str) -> String {
        self.done(&["inspect", container, "--format", what])
    }

    fn netns(&self, container: &str) -> Netns {
        let path = self.inspected(container, "{{.NetworkSettings.SandboxKey}}");
        Netns::open(Path::new(&path), &["/run/netns".into()]).unwrap()
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        end(&mut self.init);
        remove_cgroups(self.node.name());
    }
}

fn containers_conf(chain: &Chain) -> String {
    let (plugins, lists) = (chain.plugins(), chain.lists());
    format!(
        r#"[containers]
apparmor_profile = "unconfined"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "cni"
cni_plugin_dirs = ["{}"]
network_config_dir = "{}"
default_network = "{NETWORK}"
"#,
        plugins.display(),
        lists.display()
    )
}

fn storage_conf(dir: &Path) -> String {
    let dir = dir.display();
    format!("[storage]\ndriver = \"vfs\"\ngraphroot = \"{dir}/graph\"\nrunroot = \"{dir}/run\"\n")
}

fn tables(netns: &Netns) -> String {
    within(netns.path(), &["nft", "list", "tables"]).unwrap()
}

#[test]
fn a_container_passes_untouched_where_no_default_namespace_is_set_whatever_its_name() {
    let podman = Podman::running(&[]);
    assert_eq!(
        podman.done(&["info", "--format", "{{.Host.NetworkBackend}}"]),
        "cni"
    );
    podman
        .node
        .write_manifest(&Spec::new("web").ambient())
        .unwrap();
    // podman's generated names contain an underscore, which pod names cannot.
    for name in [&["--name", "web"][..], &["--name", "festive_hopper"]] {
        let (succeeded, container) = podman.run(name);
        assert!(succeeded, "{container}");
        let netns = podman.netns(container.trim());
        assert_eq!(tables(&netns), "");
        assert!(podman.node.api().claims().unwrap().is_empty());
        podman.removed(container.trim());
    }
}

#[test]
fn a_container_that_bears_the_name_of_a_pod_of_the_default_namespace_is_in_the_mesh() {
    let podman = Podman::running(&[("defaultNamespace", json!("shop"))]);
    let spec = Spec::new("web").ambient();
    podman.node.write_manifest(&spec).unwrap();
    let (succeeded, container) = podman.run(&["--name", "web"]);
    assert!(succeeded, "{container}");
    let known = podman.node.until_whole(&spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, container.trim());
    let netns = podman.netns("web");
    assert!(tables(&netns).contains("inpod-nat"));
    let outsider = podman.node.sandbox(Spec::new("outsider")).unwrap();
    let app = App::start(&netns, PORT).unwrap();
    let address = podman.inspected(
        "web",
        &format!("{{{{.NetworkSettings.Networks.{NETWORK}.IPAddress}}}}"),
    );
    let to = SocketAddr::new(address.parse().unwrap(), PORT);
    assert_eq!(ask(&outsider.netns, to).unwrap(), outsider.v4);
    let taken = podman.node.accesses().unwrap();
    let taken: Vec<_> = taken
        .iter()
        .map(|access| (access.uid.as_str(), access.listener))
        .collect();
    assert_eq!(taken.first(), Some(&(spec.uid.as_str(), 15006)));
    drop((app, netns));
    outsider.unmount().unwrap();
    drop(outsider);
    podman.removed("web");
    assert!(podman.node.api().claims().unwrap().is_empty());
    podman.node.until(&spec, PodState::Out, TIMEOUT).unwrap();
}

#[test]
fn a_container_of_the_default_namespace_that_is_no_pod_is_refused_with_the_reason() {
    let podman = Podman::running(&[("defaultNamespace", json!("shop"))]);
    let (succeeded, message) = podman.run(&["--name", "nobody"]);
    assert!(!succeeded);
    assert!(
        message.contains("shop/nobody") && message.contains("[POD_UNKNOWN]"),
        "{message}"
    );
    podman.removed("nobody");
}

#[test]
fn a_container_is_removed_while_the_agent_is_away_and_forgotten_when_it_is_back() {
    let podman = Podman::running(&[("defaultNamespace", json!("shop"))]);
    let spec = Spec::new("web").ambient();
    podman.node.write_manifest(&spec).unwrap();
    let (succeeded, container) = podman.run(&["--name", "web"]);
    assert!(succeeded, "{container}");
    podman.node.stop("pod-events", Signal::SIGKILL).unwrap();
    let (succeeded, message) = podman.run(&["--name", "other"]);
    assert!(
        !succeeded && message.contains("[AGENT_UNAVAILABLE]"),
        "{message}"
    );
    podman.done(&["rm", "-f", "-t", "0", "other"]);
    podman.removed("web");
    assert_ne!(spooled(&podman.node), 0);
    podman.node.start("pod-events").unwrap();
    podman.node.ready().unwrap();
    assert_eq!(spooled(&podman.node), 0);
    eventually("nothing is claimed", TIMEOUT, || {
        let claims = podman.node.api().claims()?;
        ensure!(claims.is_empty(), "{claims:?}");
        anyhow::Ok(())
    })
    .unwrap();
}
