//! From a real istio-cni to inpod and back by `deploy/docs/migrate-from-istio-cni.md`: Istio's agent and plugin with
//! their chart's settings and RBAC, a real API server, and the chain on disk. No DaemonSet controller runs: the test
//! starts and ends what a kubelet would.

mod probes;
mod runtime;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Duration,
};

use crate::common::cluster::Cluster;
use anyhow::ensure;
use integration::clients::{Clients, Tally, tally};
use integration::{
    App, Cgroups, Inhabitant, IstioCni, Pod, Spec, TIMEOUT, bin, connect, eventually,
    istio_cni_programs, source_seen,
};
use nix::sys::signal::Signal;
use runtime::{PRIMARY, Runtime};
use serde_json::{Value, json};

const PORT: u16 = 8080;

/// ztunnel reconnects within 15 s; istio-cni's pods end within 30 s.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Removes our rules, as in `deploy/docs/migrate-from-istio-cni.md`.
const REMOVE: &str = "nft list tables | grep -o 'inet inpod-.*' | while read -r table; do nft delete table $table; done";

const REDIRECTION: &str = "/metadata/annotations/ambient.istio.io~1redirection";

/// A chain, and a ztunnel that waits for its agent.
struct Scene<'a> {
    runtime: Runtime<'a>,
    cgroups: Cgroups,
    outsider: Pod,
    dir: PathBuf,
    way: ChainForm,
}

#[derive(Clone, Copy)]
struct ChainForm {
    istio: &'static [(&'static str, &'static str)],
    mode: &'static str,
    /// True if istio-cni ends on SIGTERM. If another file sorts before its own, it rewrites its own in a loop
    /// and ignores the signal.
    ends: bool,
}

/// A process named kubelet, without whose user istio-cni writes no nf_tables. Ended on drop.
struct Kubelet(Child);

impl Kubelet {
    fn start(dir: &Path) -> Self {
        let program = dir.join("kubelet").display().to_string();
        integration::run("install", &["-m755", "/bin/sleep", &program]).unwrap();
        Self(Command::new(program).arg("infinity").spawn().unwrap())
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A process where agents search for one, ended on drop.
struct Running {
    pod: Pod,
    _inhabitant: Inhabitant,
}

impl<'a> Scene<'a> {
    fn new(cluster: &'a Cluster, way: ChainForm) -> Self {
        let dir = cluster.node.run_dir().with_file_name("node");
        let host = dir.join("host");
        for part in ["etc/cni/net.d", "opt/cni/bin"] {
            fs::create_dir_all(host.join(part)).unwrap();
        }
        fs::write(host.join("etc/cni/net.d/10-podnet.conflist"), PRIMARY).unwrap();
        Self {
            runtime: Runtime { cluster, host },
            cgroups: Cgroups::new().unwrap(),
            outsider: cluster.node.sandbox(Spec::new("outsider")).unwrap(),
            dir,
            way,
        }
    }

    fn cluster(&self) -> &Cluster {
        self.runtime.cluster
    }

    /// Creates pod and sandbox without calling the chain.
    fn sandbox(&self, name: &str, mode: Option<&str>) -> Running {
        let cluster = self.cluster();
        let uid = cluster.create(&cluster.object(name, mode));
        let pod = cluster.sandbox(name, &uid);
        let inhabitant = Inhabitant::of(&pod).unwrap();
        self.cgroups.put(&pod, inhabitant.pid()).unwrap();
        Running {
            pod,
            _inhabitant: inhabitant,
        }
    }

    fn set_status(&self, pod: &Pod) {
        let ips = pod.addresses().map(|ip| json!({"ip": ip.to_string()}));
        let status = json!({"phase": "Running", "podIP": pod.v4.to_string(), "podIPs": ips});
        let path = format!("{}/status", self.cluster().path(&pod.spec.name));
        self.cluster()
            .server
            .patch(&path, &json!({"status": status}))
            .unwrap();
    }

    /// Repeats ADD until the chain succeeds, as a kubelet does.
    fn pod(&self, name: &str, mode: Option<&str>) -> Running {
        let running = self.sandbox(name, mode);
        eventually("the chain takes the pod", AGENT_TIMEOUT, || {
            self.runtime.add(&running.pod)
        })
        .unwrap();
        self.set_status(&running.pod);
        running
    }

    fn redirection(&self, pod: &Pod) -> String {
        let object = self
            .cluster()
            .server
            .get(&self.cluster().path(&pod.spec.name))
            .unwrap();
        let value = object.pointer(REDIRECTION).and_then(Value::as_str);
        value.unwrap_or_default().to_owned()
    }

    /// Waits for istio-cni's rules and annotation.
    fn until_enrolled_by_istio(&self, pod: &Pod) {
        eventually("istio-cni has the pod", AGENT_TIMEOUT, || {
            let (rules, shown) = (rules(pod)?, self.redirection(pod));
            ensure!(rules.to_lowercase().contains("istio"), "{rules}");
            ensure!(shown == "enabled", "the annotation is {shown:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Waits for inpod's rules, and none of istio-cni's.
    fn until_enrolled_by_inpod(&self, pod: &Pod) {
        self.cluster().node.until_whole(&pod.spec).unwrap();
        let rules = rules(pod).unwrap();
        assert!(
            rules.contains("inpod-nat") && !rules.to_lowercase().contains("istio"),
            "{rules}"
        );
        assert_eq!(self.redirection(pod), "enabled");
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn start(&self, service: &str) {
        let [word, receipt] = [self.file("word"), self.file(&format!("{service}.left"))];
        let (host, plugin) = (self.file("host"), bin("inpod-cni").unwrap());
        let (plugin, run_dir) = (plugin.display().to_string(), self.cluster().node.run_dir());
        let agent = inpod_service::socket(&run_dir, "pod-events")
            .display()
            .to_string();
        let state = self.cluster().node.state_dir().display().to_string();
        let leave = ["--leave-file", &word, "--receipt-file", &receipt];
        let own: Vec<&str> = match service {
            "pod-events" => leave.to_vec(),
            "installer" => [
                &leave[..],
                &[
                    "--host-root",
                    &host,
                    "--plugin-source",
                    &plugin,
                    "--mode",
                    self.way.mode,
                ],
                &["--agent-socket", &agent, "--plugin-state-dir", &state],
                &[
                    "--binary-grace-seconds",
                    "0",
                    "--plugin-timeout-seconds",
                    "5",
                ],
            ]
            .concat(),
            _ => Vec::new(),
        };
        let settings = [&["--peer", "uid"][..], &own].concat();
        self.cluster().node.start_with(service, &settings).unwrap();
    }

    fn until_chain_ends_with(&self, plugin: &str) {
        eventually("the chain", TIMEOUT, || {
            let chain = self.runtime.chain();
            ensure!(chain.last().is_some_and(|last| last == plugin), "{chain:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Expects an answer without a ztunnel.
    fn reaches(&self, pod: &Pod) -> anyhow::Result<()> {
        let to = SocketAddr::new(self.outsider.v4.into(), PORT);
        let before = self.cluster().node.accesses()?.len();
        source_seen(connect(&pod.netns, to)?)?;
        ensure!(
            self.cluster().node.accesses()?.len() == before,
            "by ztunnel"
        );
        Ok(())
    }

    /// Waits until istio-cni has withdrawn the pod.
    fn remove_label(&self, pod: &Pod) {
        let change = json!({"metadata": {"labels": {"istio.io/dataplane-mode": null}}});
        let path = self.cluster().path(&pod.spec.name);
        self.cluster().server.patch(&path, &change).unwrap();
        eventually("istio-cni has let it go", AGENT_TIMEOUT, || {
            let shown = self.redirection(pod);
            ensure!(shown.is_empty(), "{shown}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// Returns either agent's state in the node's network.
    fn of_the_host(&self) -> String {
        let net = format!("--net={}", self.cluster().node.netns().path().display());
        let all = ["nft list ruleset; ipset list -name; ip rule"];
        integration::run("nsenter", &[&[net.as_str(), "sh", "-c"][..], &all].concat()).unwrap()
    }
}

/// istio-cni chooses one of the two iptables by the node.
fn rules(pod: &Pod) -> anyhow::Result<String> {
    pod.exec(&[
        "sh",
        "-c",
        "nft list ruleset; iptables-legacy-save; ip6tables-legacy-save",
    ])
}

/// "To inpod" from its step 1; returns the pod that waited.
fn to_inpod(scene: &Scene<'_>, istio: &mut IstioCni) -> Running {
    let node = &scene.cluster().node;
    istio.delete_daemonset().unwrap();
    for service in ["installer", "netconfig", "pod-events", "ztunnel-broker"] {
        scene.start(service);
    }
    node.until_ended("ztunnel-broker").unwrap();
    let said = node.tail("ztunnel-broker", 5);
    assert!(
        said.contains("is already served by another process"),
        "{said}"
    );
    scene.until_chain_ends_with("inpod-cni");
    // Only new pods of enrolled namespaces wait.
    let waits = scene.sandbox("between", Some("ambient"));
    let refused = scene.runtime.add(&waits.pod).unwrap_err().to_string();
    assert!(refused.contains("inpod-cni"), "{refused}");
    drop(scene.pod("other", None));
    assert_eq!(istio.delete_pod().unwrap(), scene.way.ends);
    scene.start("ztunnel-broker");
    scene.cluster().until_served();
    scene.runtime.add(&waits.pod).unwrap();
    scene.set_status(&waits.pod);
    waits
}

/// Nothing of istio-cni is in the chain, nor in the node's network if it ended by itself.
fn nothing_of_istio_is_left(scene: &Scene<'_>) {
    eventually("only we are in the chain", AGENT_TIMEOUT, || {
        let files = scene.runtime.files();
        let is_ours = |(_, text): &(String, String)| !text.contains("istio-cni");
        ensure!(files.iter().all(is_ours), "{files:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let left = scene.of_the_host();
    assert_eq!(
        left.to_lowercase().contains("istio"),
        !scene.way.ends,
        "{left}"
    );
}

/// "Back to istio-cni"; returns a pod that started after inpod was uninstalled.
fn back(scene: &Scene<'_>, istio: &mut IstioCni) -> Running {
    let node = &scene.cluster().node;
    fs::write(scene.file("word"), "handover").unwrap();
    for service in ["installer", "pod-events"] {
        node.until_ended(service).unwrap();
    }
    // Without its plugin the entry stays away, and pods start.
    let early = scene.sandbox("early", Some("ambient"));
    let added = scene.runtime.add(&early.pod);
    assert_eq!(added.is_ok(), scene.way.ends, "{added:?}");
    if added.is_ok() {
        scene.set_status(&early.pod);
    }
    install(istio, scene.way);
    // The objects that helm deletes.
    for service in ["netconfig", "ztunnel-broker"] {
        node.stop(service, Signal::SIGTERM).unwrap();
    }
    if added.is_err() {
        eventually("the chain takes the pod", AGENT_TIMEOUT, || {
            scene.runtime.add(&early.pod)
        })
        .unwrap();
        scene.set_status(&early.pod);
    }
    early
}

fn install(istio: &mut IstioCni, way: ChainForm) {
    istio.deploy(way.istio).map(drop).unwrap();
    istio.start(&[], "all:debug").unwrap();
}

/// Starts a ztunnel and an istio-cni that serves it.
fn start_istio(scene: &Scene<'_>) -> (Kubelet, IstioCni) {
    let cluster = scene.cluster();
    let namespace = json!({"metadata": {"name": "istio-system"}});
    cluster
        .server
        .create("/api/v1/namespaces", &namespace)
        .unwrap();
    let kubelet = Kubelet::start(&scene.dir);
    let programs = istio_cni_programs().unwrap();
    let mut istio = IstioCni::new(&cluster.server, &cluster.node, &programs, &scene.dir);
    cluster.node.start_ztunnel(&[]).unwrap();
    install(&mut istio, scene.way);
    (kubelet, istio)
}

fn there_and_back(way: ChainForm) {
    let cluster = Cluster::on_own_server();
    let scene = Scene::new(&cluster, way);
    let to = SocketAddr::new(scene.outsider.v4.into(), PORT);
    let _app = App::start(&scene.outsider.netns, PORT).unwrap();
    let (_kubelet, mut istio) = start_istio(&scene);
    let [a, b] = ["a", "b"].map(|name| scene.pod(name, Some("ambient")));
    for it in [&a, &b] {
        scene.until_enrolled_by_istio(&it.pod);
    }
    let clients = Clients::start(&[&a.pod, &b.pod], to, Duration::from_millis(50));
    clients.make(40).unwrap();

    let between = to_inpod(&scene, &mut istio);
    let next = scene.pod("next", Some("ambient"));
    for it in [&a, &b, &between, &next] {
        scene.until_enrolled_by_inpod(&it.pod);
    }
    nothing_of_istio_is_left(&scene);
    clients.make(40).unwrap();

    let early = back(&scene, &mut istio);
    let last = scene.pod("last", Some("ambient"));
    for it in [&a, &b, &between, &next, &early, &last] {
        scene.until_enrolled_by_istio(&it.pod);
    }
    clients.make(40).unwrap();
    // Rules of ours that istio-cni does not know.
    scene.remove_label(&between.pod);
    assert!(scene.reaches(&between.pod).is_err());
    for it in [&a, &next] {
        it.pod.exec(&["sh", "-c", REMOVE]).unwrap();
    }
    clients.make(40).unwrap();
    let attempts = clients.stop().unwrap();
    scene.remove_label(&next.pod);
    scene.reaches(&next.pod).unwrap();
    let failed = attempts.iter().find(|it| it.outcome.is_err());
    let through = Tally {
        made: attempts.len(),
        taken_by: vec![attempts.len()],
        ..Tally::default()
    };
    let log = cluster.node.accesses().unwrap();
    assert_eq!(tally(&attempts, &[log]), through, "{failed:?}");
}

#[test]
fn a_node_goes_from_a_real_istio_cni_to_inpod_and_back_without_a_failed_connection() {
    there_and_back(ChainForm {
        istio: &[],
        mode: "owned",
        ends: true,
    });
}

#[test]
fn so_does_one_where_istio_cni_writes_nf_tables() {
    there_and_back(ChainForm {
        istio: &[("NATIVE_NFTABLES", "true")],
        mode: "owned",
        ends: true,
    });
}

#[test]
fn so_does_one_where_inpod_is_in_the_file_of_the_primary() {
    there_and_back(ChainForm {
        istio: &[],
        mode: "in-place",
        ends: true,
    });
}

#[test]
fn so_does_one_where_istio_cni_has_a_file_of_its_own() {
    there_and_back(ChainForm {
        istio: &[("ISTIO_OWNED_CNI_CONFIG", "true")],
        mode: "owned",
        ends: false,
    });
}
