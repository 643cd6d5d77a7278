//! inpod is installed beside another agent's pods: none is cut, whether its netns is found at once or not.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use crate::common::flows::Flow;
use crate::common::incumbent::{Form, Incumbent, redirect};
use anyhow::{Context as _, ensure};
use inpod_proto::{
    podevents::v1::PodState,
    types::v1::Reason,
    ztunnelbroker::v1::{WorkloadPhase, WorkloadStatus},
};
use integration::clients::{Attempt, Clients, Tally, tally};
use integration::{
    App, Cgroups, Inhabitant, Node, Pod, SERVICES, Spec, TIMEOUT, eventually, is_alone, not_run,
};
use nix::sys::signal::Signal;

const PORT: u16 = 8080;

/// Pods with and without processes by which netconfig finds them.
const FOUND: usize = 25;
const UNFOUND: usize = 25;

/// An unsuccessful search is repeated within half a minute.
const SEARCHED_AGAIN: Duration = Duration::from_secs(40);

/// A ztunnel serves the ended incumbent's pods.
struct Scene {
    pods: Vec<Pod>,
    outsider: Pod,
    _app: App,
    inhabitants: Vec<Inhabitant>,
    cgroups: Cgroups,
    node: Node,
}

impl Scene {
    /// Returns `None` in an isolation without root, which can make no cgroups.
    fn new(found: usize, unfound: usize) -> anyhow::Result<Option<Self>> {
        Self::with(found, unfound, |index| {
            [Form::Iptables, Form::Nft][index % 2]
        })
    }

    /// Creates the same with a form of the incumbent's rules for each pod.
    fn with(
        found: usize,
        unfound: usize,
        form: impl Fn(usize) -> Form,
    ) -> anyhow::Result<Option<Self>> {
        let node = Node::new()?;
        let cgroups = match Cgroups::new() {
            Ok(cgroups) => cgroups,
            Err(error) if is_alone() => {
                not_run(format!("it cannot make a cgroup: {error:#}"));
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let scene = SCENES.fetch_add(1, Ordering::Relaxed);
        let specs = (0..found + unfound).map(|index| spec(scene, index));
        let mut pods = node.sandboxes(specs.collect())?;
        let outsider = node.sandbox(Spec::new("outsider"))?;
        for pod in &mut pods {
            pod.spec.addresses = pod.addresses().to_vec();
            pod.spec.is_redirected = true;
            node.write_manifest(&pod.spec)?;
        }
        let start = || node.start_ztunnel(&[]);
        let mut incumbent = Incumbent::serve(&node.zds_socket(), start)?;
        incumbent.give(&pods)?;
        for (index, pod) in pods.iter().enumerate() {
            redirect(pod, form(index))?;
        }
        let mut scene = Self {
            _app: App::start(&outsider.netns, PORT)?,
            pods,
            outsider,
            inhabitants: Vec::new(),
            cgroups,
            node,
        };
        (0..found).try_for_each(|index| scene.start_process(index))?;
        Ok(Some(scene))
    }

    fn start_process(&mut self, index: usize) -> anyhow::Result<()> {
        let pod = self.pods.get(index).context("a pod")?;
        let inhabitant = Inhabitant::of(pod)?;
        self.cgroups.put(pod, inhabitant.pid())?;
        self.inhabitants.push(inhabitant);
        Ok(())
    }

    fn target(&self) -> SocketAddr {
        SocketAddr::new(self.outsider.v4.into(), PORT)
    }

    fn flow(&self, index: usize) -> anyhow::Result<Flow> {
        Flow::open(self.pods.get(index).context("a pod")?, self.target())
    }

    fn start_inpod(&self) -> anyhow::Result<()> {
        SERVICES.iter().try_for_each(|it| self.node.start(it))?;
        self.node.ready()
    }

    fn workloads(&self) -> anyhow::Result<BTreeMap<String, WorkloadStatus>> {
        let all = self.node.api().workloads()?.workloads.into_iter();
        let uid = |status: &WorkloadStatus| Some(status.workload.as_ref()?.uid.clone());
        Ok(all.filter_map(|it| Some((uid(&it)?, it))).collect())
    }

    /// Returns ztunnel's starts of a pod: one that was cut and came back counts twice.
    fn starts(&self) -> usize {
        self.node
            .tail("ztunnel", usize::MAX)
            .matches("pod started")
            .count()
    }

    fn served(&self) -> anyhow::Result<Vec<String>> {
        let state = self.node.ztunnel_state()?;
        let pods = state.get("pods").and_then(serde_json::Value::as_array);
        let pods = pods.context("no pods")?.iter();
        Ok(pods
            .map(|pod| format!("{} {}", pod["uid"], pod["netns"]))
            .collect())
    }
}

/// netconfig searches all processes, including those of concurrent scenes.
static SCENES: AtomicU32 = AtomicU32::new(0);

/// A cgroup's name can contain its UID.
fn spec(scene: u32, index: usize) -> Spec {
    let process = std::process::id();
    Spec {
        uid: format!("{process:08x}-{index:04x}-4333-8444-{scene:012x}"),
        ..Spec::new(&format!("web-{index}")).ambient()
    }
}

fn phase(status: &WorkloadStatus) -> Option<WorkloadPhase> {
    status.states.first().map(|state| state.phase())
}

/// Every attempt succeeded through ztunnel, some after a given time.
fn assert_all_went_through(scene: &Scene, attempts: &[Attempt], since: Instant) {
    let all = attempts.len();
    let late = attempts.iter().filter(|attempt| attempt.at > since);
    assert!(late.count() > 100);
    let through = Tally {
        made: all,
        taken_by: vec![all],
        ..Tally::default()
    };
    let failed = attempts.iter().find(|it| it.outcome.is_err());
    let log = scene.node.accesses().unwrap();
    assert_eq!(tally(attempts, &[log]), through, "{failed:?}");
}

#[test]
fn of_the_incumbents_fifty_pods_none_is_cut_whether_its_netns_is_found_or_not() {
    let Some(mut scene) = Scene::new(FOUND, UNFOUND).unwrap() else {
        return;
    };
    let served = scene.served().unwrap();
    assert_eq!(
        (served.len(), scene.starts()),
        (FOUND + UNFOUND, FOUND + UNFOUND)
    );
    let watched = [0, 1, 2, FOUND, FOUND + 1, FOUND + 2];
    let flows = watched.map(|index| scene.flow(index).unwrap());
    let every_fifth: Vec<_> = scene.pods.iter().step_by(5).collect();
    let clients = Clients::start(&every_fifth, scene.target(), Duration::from_millis(50));
    clients.make(100).unwrap();

    let came = Instant::now();
    scene.start_inpod().unwrap();
    let (found, unfound) = scene.pods.split_at(FOUND);
    for pod in found {
        scene.node.until_whole(&pod.spec).unwrap();
        let rules = pod.ruleset().unwrap();
        assert!(
            rules.contains("inpod-nat") && !rules.to_lowercase().contains("istio"),
            "{rules}"
        );
    }
    clients.make(100).unwrap();
    let workloads = scene.workloads().unwrap();
    assert_eq!(workloads.len(), FOUND + UNFOUND);
    for pod in unfound {
        let kept = &workloads[&pod.spec.uid];
        assert_eq!(phase(kept), Some(WorkloadPhase::Kept), "{kept:?}");
        let rules = pod.ruleset().unwrap().to_lowercase();
        assert!(rules.contains("istio"), "{rules}");
    }
    flows.iter().for_each(|flow| flow.goes_on().unwrap());
    assert_eq!(scene.served().unwrap(), served);
    assert_eq!(scene.starts(), FOUND + UNFOUND, "a pod was cut");

    // Its processes appear later.
    scene.start_process(FOUND).unwrap();
    let late = &scene.pods[FOUND];
    eventually("it is found", SEARCHED_AGAIN, || {
        let known = scene.node.explain(&late.spec)?;
        ensure!(known.state() == PodState::Enrolled, "{known:?}");
        anyhow::Ok(())
    })
    .unwrap();
    scene.node.until_whole(&late.spec).unwrap();
    clients.make(50).unwrap();
    flows.iter().for_each(|flow| flow.goes_on().unwrap());
    assert_eq!(scene.starts(), FOUND + UNFOUND, "a pod was cut");
    assert_all_went_through(&scene, &clients.stop().unwrap(), came);
}

#[test]
fn a_pod_that_was_only_kept_is_forgotten_when_it_is_gone_and_gives_way_to_its_next_sandbox() {
    let Some(scene) = Scene::new(0, 2).unwrap() else {
        return;
    };
    scene.start_inpod().unwrap();
    let [gone, anew] = &scene.pods[..] else {
        unreachable!("there are two")
    };
    assert_eq!(scene.workloads().unwrap().len(), 2);
    let manifest = format!("{}-{}.yaml", gone.spec.namespace, gone.spec.name);
    fs::remove_file(scene.node.manifests().join(manifest)).unwrap();
    eventually("it is forgotten", TIMEOUT, || {
        let (desired, served) = (scene.workloads()?, scene.served()?);
        ensure!(
            desired.len() == 1 && served.len() == 1,
            "{desired:?} {served:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();

    // The runtime makes the sandbox anew.
    let next = scene.node.sandbox(anew.spec.clone()).unwrap();
    scene.node.add(&next).unwrap();
    let known = scene.node.until_whole(&next.spec).unwrap();
    assert_eq!(known.sandbox.unwrap().container_id, next.container_id);
    eventually("only the next sandbox is left", TIMEOUT, || {
        let desired = scene.node.api().workloads()?.workloads;
        let records = fs::read_dir(scene.node.run_dir().join("pod-events/pods"))?.count();
        ensure!(desired.len() == 1 && records == 1, "{records} {desired:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn a_pod_that_is_annotated_and_no_longer_wanted_leaves_in_order_and_restarts_change_nothing() {
    let Some(scene) = Scene::new(3, 1).unwrap() else {
        return;
    };
    let unwanted = Spec {
        mode: None,
        ..scene.pods[0].spec.clone()
    };
    scene.node.write_manifest(&unwanted).unwrap();
    scene.start_inpod().unwrap();
    scene.node.until(&unwanted, PodState::Out, TIMEOUT).unwrap();
    // A pod not found yet is withdrawn, too.
    eventually("nothing of ours or Istio's is left", TIMEOUT, || {
        let (mut traces, desired) = (scene.pods[0].traces()?, scene.workloads()?);
        // The tables of iptables-nft stay, empty: others may use them.
        traces.retain(|line| !line.starts_with("table ip"));
        ensure!(
            !scene.pods[0].ruleset()?.contains("ISTIO"),
            "Istio's chains"
        );
        ensure!(traces.is_empty() && desired.len() == 3, "{traces:?}");
        anyhow::Ok(())
    })
    .unwrap();
    let flows = [1, 2, 3].map(|index| scene.flow(index).unwrap());
    let starts = scene.starts();
    for services in [&["pod-events"][..], &["netconfig"], &SERVICES] {
        for service in services {
            scene.node.stop(service, Signal::SIGKILL).unwrap();
            scene.node.start(service).unwrap();
        }
        scene.node.ready().unwrap();
        for pod in &scene.pods[1..3] {
            scene.node.until_whole(&pod.spec).unwrap();
        }
        let known = scene.workloads().unwrap();
        assert_eq!(
            (known.len(), scene.starts()),
            (3, starts),
            "{services:?} {known:?}"
        );
        flows.iter().for_each(|flow| flow.goes_on().unwrap());
    }
    // The DEL names its network; the sandbox was found without one.
    let found = scene.node.explain(&scene.pods[1].spec).unwrap().sandbox;
    assert_eq!(found.unwrap().network_name, "");
    scene.node.del(&scene.pods[1]).unwrap();
    assert!(
        !scene
            .workloads()
            .unwrap()
            .contains_key(&scene.pods[1].spec.uid)
    );
}

/// Returns once a pod is known to have rules that inpod can neither see nor replace.
fn until_legacy(scene: &Scene, spec: &Spec) {
    eventually("its legacy rules are reported", TIMEOUT, || {
        let known = scene.node.explain(spec)?;
        let reason = known.last_failure.as_ref().map(|it| it.reason());
        ensure!(
            reason == Some(Reason::LegacyRules) && known.state() == PodState::Enrolled,
            "{known:?}"
        );
        anyhow::Ok(())
    })
    .unwrap();
}

fn host_rules(scene: &Scene) -> String {
    let net = format!("--net={}", scene.node.netns().path().display());
    integration::run("nsenter", &[&net, "nft", "list", "ruleset"]).unwrap()
}

fn leave_settings(scene: &Scene) -> [String; 2] {
    ["leave", "receipt"].map(|name| scene.node.run_dir().join(name).display().to_string())
}

#[test]
fn a_pod_with_the_incumbents_rules_in_legacy_tables_keeps_them_until_it_ends() {
    let legacy = |index| [Form::Legacy, Form::Legacy, Form::Iptables][index];
    let Some(scene) = Scene::with(3, 0, legacy).unwrap() else {
        return;
    };
    let [wanted, unwanted, listed] = &scene.pods[..] else {
        unreachable!("there are three")
    };
    // To list a table puts it into use, which is nobody's rule.
    listed
        .exec(&["iptables-legacy", "-t", "nat", "-L"])
        .unwrap();
    let without_label = Spec {
        mode: None,
        ..unwanted.spec.clone()
    };
    scene.node.write_manifest(&without_label).unwrap();
    let flows = [0, 1, 2].map(|index| scene.flow(index).unwrap());
    let starts = scene.starts();
    for service in ["netconfig", "ztunnel-broker"] {
        scene.node.start(service).unwrap();
    }
    let [word, receipt] = leave_settings(&scene);
    let settings = [
        "--peer",
        "uid",
        "--leave-file",
        &word,
        "--receipt-file",
        &receipt,
    ];
    scene.node.start_with("pod-events", &settings).unwrap();
    scene.node.ready().unwrap();
    scene.node.until_whole(&listed.spec).unwrap();
    until_legacy(&scene, &wanted.spec);
    until_legacy(&scene, &without_label);
    for pod in [wanted, unwanted] {
        keeps_legacy_rules(&scene, pod);
    }
    flows.iter().for_each(|flow| flow.goes_on().unwrap());
    assert_eq!(scene.starts(), starts, "a pod was cut");

    // A ztunnel that starts anew is given their netns.
    restart_ztunnel(&scene);
    for index in 0..2 {
        scene.flow(index).unwrap().goes_on().unwrap();
    }
    // A pod-events that starts anew knows them again.
    scene.node.stop("pod-events", Signal::SIGKILL).unwrap();
    scene.node.start_with("pod-events", &settings).unwrap();
    scene.node.ready().unwrap();
    until_legacy(&scene, &wanted.spec);
    until_legacy(&scene, &without_label);

    fs::write(&word, "uninstall\n").unwrap();
    assert!(scene.node.until_ended("pod-events").unwrap().success());
    let receipt = fs::read_to_string(receipt).unwrap();
    assert!(receipt.contains("1 pods were withdrawn"), "{receipt}");
    assert_eq!(host_rules(&scene), "");
    for pod in [wanted, unwanted] {
        assert!(receipt.contains(&pod.spec.name), "{receipt}");
    }
    for index in 0..2 {
        scene.flow(index).unwrap().goes_on().unwrap();
    }
}

fn keeps_legacy_rules(scene: &Scene, pod: &Pod) {
    let rules = pod.exec(&["iptables-legacy-save", "-t", "nat"]).unwrap();
    assert!(rules.contains("ISTIO_OUTPUT"), "{rules}");
    assert!(!pod.ruleset().unwrap().contains("inpod"));
    let exempted = host_rules(scene);
    assert!(exempted.contains(&pod.v4.to_string()), "{exempted}");
}

fn restart_ztunnel(scene: &Scene) {
    scene.node.stop("ztunnel", Signal::SIGKILL).unwrap();
    scene.node.start_ztunnel(&[]).unwrap();
    eventually("it serves the pods", TIMEOUT, || {
        let served = scene.served()?;
        ensure!(served.len() == scene.pods.len(), "{served:?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// Without the annotation of another agent, rules in legacy tables are the pod's own.
#[test]
fn a_pod_that_uses_legacy_tables_itself_is_enrolled_and_it_is_told() {
    let node = Node::running().unwrap();
    let spec = Spec::new("own");
    let pod = node.pod(spec.clone()).unwrap();
    let rule = [
        "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "--dport", "81", "-j", "ACCEPT",
    ];
    pod.exec(&[&["iptables-legacy"][..], &rule].concat())
        .unwrap();
    let spec = spec.ambient();
    node.write_manifest(&spec).unwrap();
    let known = node.until_whole(&spec).unwrap();
    let findings = format!("{known:?}");
    assert!(
        findings.contains("legacy table nat is in use"),
        "{findings}"
    );
}
