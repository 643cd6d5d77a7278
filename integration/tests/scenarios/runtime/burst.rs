//! A hundred pods start concurrently and end concurrently.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write as _},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use inpod_proto::podevents::v1::{ListPodsRequest, PodState};
use integration::{Pod, Spec, TIMEOUT, Verbs, eventually};
use tonic::Status;

use crate::runtime::{
    containerd::Runtime,
    cri::{Cri, PodSandboxConfig},
    sandboxes::in_the_mesh,
};

const PODS: usize = 100;

/// For all of them on two busy processors.
const LONG: Duration = Duration::from_secs(150);

fn at_once<T: Sync, R: Send>(things: &[T], many: usize, act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..many {
            scope.spawn(|| {
                while let index = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(thing) = things.get(index)
                {
                    let result = act(thing);
                    done.lock().unwrap().insert(index, result);
                }
            });
        }
    });
    done.into_inner().unwrap().into_values().collect()
}

/// Repeats RunPodSandbox until the pod's deadline, as a kubelet does.
fn run(cri: &Cri, config: &PodSandboxConfig, attempts: &AtomicUsize) -> Result<String, Status> {
    let deadline = Instant::now() + LONG;
    loop {
        attempts.fetch_add(1, Ordering::Relaxed);
        match cri.run(config.clone()) {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(500)),
            outcome => return outcome,
        }
    }
}

/// Returns the names from this machine's private /run.
fn netns() -> BTreeSet<String> {
    let entries = fs::read_dir("/run/netns").unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("cni-")).collect()
}

/// Expects nothing besides what [`Runtime::until_empty`] checks.
fn nothing_left(runtime: &Runtime, pods: &[Pod]) {
    runtime.until_empty().unwrap();
    let netns = netns();
    let left = pods
        .iter()
        .filter_map(|pod| pod.path().file_name()?.to_str());
    let left: Vec<_> = left.filter(|name| netns.contains(*name)).collect();
    assert!(left.is_empty(), "{left:?}");
    let records = runtime.node.run_dir().join("pod-events/pods");
    eventually("no sandbox is written down", TIMEOUT, || {
        let count = fs::read_dir(&records)?.count();
        ensure!(count == 0, "{count} are");
        anyhow::Ok(())
    })
    .unwrap();
    let state = runtime.node.ztunnel_state().unwrap().to_string();
    let rules =
        crate::runtime::chain::within(runtime.node.netns().path(), &["nft", "list", "ruleset"]);
    let rules = rules.unwrap();
    for pod in pods {
        assert!(!state.contains(&pod.spec.uid), "{state}");
        assert!(!rules.contains(&format!("{} ", pod.v4)), "{rules}");
    }
}

fn burst(many: usize) {
    let runtime = Runtime::running().unwrap();
    let specs = (0..PODS).map(|number| Spec::new(&format!("web-{number}")).ambient());
    let specs: Vec<_> = specs.collect();
    let manifests = specs
        .iter()
        .try_for_each(|spec| runtime.node.write_manifest(spec));
    manifests.unwrap();
    let known = specs
        .iter()
        .try_for_each(|spec| runtime.node.until_known(spec));
    known.unwrap();
    let cri = runtime.client().unwrap().patient_for(LONG);
    let attempts = AtomicUsize::new(0);
    let configs: Vec<_> = specs.iter().map(|spec| runtime.config(spec)).collect();
    let began = Instant::now();
    let ids = at_once(&configs, many, |config| run(&cri, config, &attempts));
    let came = began.elapsed();
    let ids: Vec<_> = ids.into_iter().collect::<Result<_, _>>().unwrap();
    let pods = specs
        .into_iter()
        .zip(&ids)
        .map(|(spec, id)| runtime.sandbox(spec, id));
    let pods: Vec<_> = pods.collect::<Result<_, _>>().unwrap();
    each_once(&runtime, &pods);
    let began = Instant::now();
    let ended = at_once(&ids, many, |id| {
        cri.stop(id)?;
        cri.remove(id)
    });
    let went = began.elapsed();
    ended.into_iter().collect::<Result<(), _>>().unwrap();
    nothing_left(&runtime, &pods);
    no_drift(&runtime);
    // libtest shows only failed tests' output.
    let line = format!(
        "{PODS} pods, {many} at once: all in the mesh after {came:?} ({} attempts), all gone after {went:?}\n",
        attempts.into_inner()
    );
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// containerd sets `lo` down before each DEL, and the kernel then drops routes: that is no drift.
fn no_drift(runtime: &Runtime) {
    let socket = inpod_service::socket(&runtime.node.run_dir(), "pod-events");
    let metrics = Verbs::at(&socket).unwrap().metrics(&socket).unwrap();
    let is_counted =
        |line: &&str| line.starts_with("inpod_pod_events_drift_total") && !line.ends_with(" 0");
    let drift: Vec<_> = metrics.lines().filter(is_counted).collect();
    assert!(drift.is_empty(), "{drift:?}");
}

fn each_once(runtime: &Runtime, pods: &[Pod]) {
    let api = runtime.node.api();
    let filter = ListPodsRequest::default();
    let listed = api.list(filter).unwrap();
    let enrolled = listed
        .iter()
        .filter(|pod| pod.state() == PodState::Enrolled);
    assert_eq!(enrolled.count(), PODS);
    let claims = api.claims().unwrap();
    let sandboxes = claims.into_iter().filter_map(|claim| claim.sandbox);
    let claimed: Vec<_> = sandboxes.map(|sandbox| sandbox.container_id).collect();
    let distinct: BTreeSet<_> = claimed.iter().collect();
    let expected: BTreeSet<_> = pods.iter().map(|pod| &pod.container_id).collect();
    assert_eq!((claimed.len(), &distinct), (PODS, &expected));
    let workloads = api.workloads().unwrap().workloads;
    assert_eq!(workloads.len(), PODS);
    let addresses: BTreeSet<_> = pods.iter().flat_map(Pod::addresses).collect();
    assert_eq!(addresses.len(), 2 * PODS);
    assert_eq!(runtime.chain.addresses().unwrap().len(), 2 * PODS);
    for pod in pods.iter().step_by(PODS / 10) {
        in_the_mesh(runtime, pod);
    }
}

#[test]
fn a_hundred_pods_come_sixteen_at_a_time_and_go_and_nothing_is_left() {
    burst(16);
}
