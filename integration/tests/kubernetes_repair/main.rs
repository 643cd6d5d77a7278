//! repair against a real API server, with exactly the rights that the chart gives to each of its ways: what it tells,
//! labels, deletes and leaves. What pod-events says is a test's word, but where the real one is meant.
#![cfg(feature = "apiserver")]
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

#[path = "../cluster/mod.rs"]
mod cluster;
mod fake;
mod real;
mod rights;
mod sidecar;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use fake::Fake;
use inpod_proto::{podevents::v1::PodState, types::v1::Enrollment};
use integration::{Act, ApiProxy, ApiServer, Cut, Node, PATIENCE, Verb, eventually, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

static NEXT: AtomicU32 = AtomicU32::new(1);

/// Which of its ways are on, and so which rights it has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Repair,
    Label,
    Delete,
}

const LABEL: &str = "/metadata/labels/cni.istio.io~1uninitialized";

fn manifest(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(format!("deploy/manifests/{name}.yaml"))).unwrap()
}

/// The server of a way, with what is deployed for it: tests of one way share it.
fn server(way: Way) -> Arc<ApiServer> {
    static SERVERS: [Mutex<Weak<ApiServer>>; 3] = [const { Mutex::new(Weak::new()) }; 3];
    let (at, over) = match way {
        Way::Repair => (0, None),
        Way::Label => (1, Some("repair-label")),
        Way::Delete => (2, Some("repair-delete")),
    };
    let mut shared = SERVERS
        .get(at)
        .unwrap()
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = shared.upgrade() {
        return server;
    }
    let server = Arc::new(ApiServer::start().unwrap());
    server.apply(&manifest("repair")).unwrap();
    if let Some(over) = over {
        server.apply(&manifest(over)).unwrap();
    }
    *shared = Arc::downgrade(&server);
    server
}

/// A node with repair's identity, a namespace, and what pod-events says there.
pub(crate) struct Desk {
    pub(crate) server: Arc<ApiServer>,
    pub(crate) node: Node,
    pub(crate) namespace: String,
    /// Of repair's identity.
    kubeconfig: PathBuf,
    said: Fake,
    way: Way,
}

impl Desk {
    pub(crate) fn new(way: Way) -> Self {
        Self::beside(way, "kubeconfig", Fake::start)
    }

    /// Beside the real pod-events and netconfig, which need no more for pods with a sidecar.
    pub(crate) fn real(way: Way) -> Self {
        let desk = Self::beside(way, "kubeconfig-of-repair", |_| Fake::silent());
        desk.node.start("netconfig").unwrap();
        desk.node.start("pod-events").unwrap();
        desk
    }

    fn beside(way: Way, kubeconfig: &str, said: impl FnOnce(&Path) -> Fake) -> Self {
        let server = server(way);
        let node = Node::of_cluster(&server).unwrap();
        let kubeconfig = node.kubeconfig().with_file_name(kubeconfig);
        let identity = server.kubeconfig_for("inpod-repair", node.name());
        fs::write(&kubeconfig, identity.unwrap()).unwrap();
        let namespace = format!("repair-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        server.create("/api/v1/namespaces", &object).unwrap();
        let said = said(&node.run_dir());
        Self {
            server,
            node,
            namespace,
            kubeconfig,
            said,
            way,
        }
    }

    /// As the chart starts it, waiting for so many seconds.
    fn start(&self, wait: u32, more: &[&str]) {
        let (label, delete) = (
            matches!(self.way, Way::Label),
            matches!(self.way, Way::Delete),
        );
        let kubeconfig = self.kubeconfig.display().to_string();
        let (wait, label, delete) = (wait.to_string(), label.to_string(), delete.to_string());
        let usual = [
            ["--peer", "uid"],
            ["--node-name", self.node.name()],
            ["--kubeconfig", &kubeconfig],
            ["--label-pods", &label],
            ["--delete-pods", &delete],
            ["--repair-wait-seconds", &wait],
        ];
        let is_usual = |pair: &&[&str; 2]| !more.contains(&pair[0]);
        let usual = usual.iter().filter(is_usual).flatten();
        let settings: Vec<_> = usual.chain(more).copied().collect();
        self.node.start_with("repair", &settings).unwrap();
        eventually("repair is ready", PATIENCE, || {
            ensure!(self.counted("inpod_repair_ready") == 1, "not yet");
            let heard = self.counted("inpod_repair_condition{name=\"pod-events\"}");
            ensure!(heard == 1, "it does not hear pod-events");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    pub(crate) fn pod(&self, name: &str) -> anyhow::Result<Value> {
        self.server.get(&self.path(name))
    }

    /// A pod of the node; its UID.
    pub(crate) fn make(&self, name: &str, labels: &Value) -> String {
        self.make_on(self.node.name(), name, labels)
    }

    pub(crate) fn make_on(&self, node: &str, name: &str, labels: &Value) -> String {
        let container = |name: &str| json!({"name": name, "image": "app"});
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels, "annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"nodeName": node, "initContainers": [container("istio-validation")], "containers": [container("app")]},
        });
        self.create(&pod)
    }

    /// A pod as it is written; its UID.
    fn create(&self, pod: &Value) -> String {
        let path = format!("/api/v1/namespaces/{}/pods", self.namespace);
        let made = self.server.create(&path, pod).unwrap();
        made.pointer("/metadata/uid")
            .and_then(Value::as_str)
            .unwrap()
            .to_owned()
    }

    /// As a kubelet shows a container that failed, in a run that began at a second of 1970, and waits.
    pub(crate) fn fail(&self, name: &str, code: i32) {
        let failed = json!({"exitCode": code, "reason": "Error", "startedAt": "2026-01-01T00:01:40Z", "finishedAt": "2026-01-01T00:01:45Z"});
        self.show(
            name,
            &json!({"waiting": {"reason": "CrashLoopBackOff"}}),
            &json!({"terminated": failed}),
        );
    }

    /// As it shows one that has passed.
    fn pass(&self, name: &str) {
        let done = json!({"exitCode": 0, "reason": "Completed"});
        self.show(
            name,
            &json!({"terminated": done}),
            &json!({"terminated": {"exitCode": 126, "reason": "Error"}}),
        );
    }

    fn show(&self, name: &str, state: &Value, last: &Value) {
        let status = json!({"name": "istio-validation", "image": "app", "imageID": "", "ready": false, "restartCount": 1, "state": state, "lastState": last});
        let change = json!({"status": {"phase": "Pending", "initContainerStatuses": [status]}});
        self.server
            .patch(&format!("{}/status", self.path(name)), &change)
            .unwrap();
    }

    /// A failed pod, of which pod-events says that it could not be redirected.
    fn broken(&self, name: &str) -> String {
        let uid = self.make(name, &json!({}));
        self.said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
        self.fail(name, 126);
        uid
    }

    fn counted(&self, series: &str) -> u64 {
        let socket = daemon::socket(&self.node.run_dir(), "repair");
        let words = [
            "-sSf",
            "--unix-socket",
            socket.to_str().unwrap(),
            "http://localhost/metrics",
        ];
        let text = run("curl", &words).unwrap_or_default();
        let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
        text.lines().find_map(value).unwrap_or_default()
    }

    fn pods(&self, way: &str, result: &str) -> u64 {
        self.counted(&format!(
            "inpod_repair_pods_total{{type=\"{way}\",result=\"{result}\"}}"
        ))
    }

    fn until_counted(&self, way: &str, result: &str, wanted: u64) {
        eventually("it is counted", PATIENCE, || {
            let found = self.pods(way, result);
            ensure!(found == wanted, "{way} {result}: {found}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    pub(crate) fn event(&self, name: &str, reason: &str, kind: &str) -> String {
        eventually("the Event is there", PATIENCE, || {
            let path = format!(
                "/apis/events.k8s.io/v1/namespaces/{}/events",
                self.namespace
            );
            let all = self.server.get(&path)?;
            let says = |event: &&Value, at: &str, wanted: &str| {
                event.pointer(at).and_then(Value::as_str) == Some(wanted)
            };
            let mut all = all
                .pointer("/items")
                .and_then(Value::as_array)
                .context("a list")?
                .iter();
            let found = all.find(|event| {
                says(event, "/regarding/name", name)
                    && says(event, "/reason", reason)
                    && says(event, "/type", kind)
            });
            let found = found.with_context(|| format!("no {kind} {reason} of {name}"))?;
            assert_eq!(found["reportingController"], "inpod.io/repair");
            assert_eq!(found["reportingInstance"], self.node.name());
            anyhow::Ok(found["note"].as_str().unwrap_or_default().to_owned())
        })
        .unwrap()
    }

    fn until_labelled(&self, name: &str, wanted: Option<&str>) {
        eventually("the pod bears the label", PATIENCE, || {
            let pod = self.pod(name)?;
            let found = pod.pointer(LABEL).and_then(Value::as_str);
            ensure!(found == wanted, "{found:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }

    fn until_gone(&self, name: &str) {
        eventually("the pod is deleted", PATIENCE, || match self.pod(name) {
            Err(_) => anyhow::Ok(()),
            Ok(pod) => {
                ensure!(
                    pod.pointer("/metadata/deletionTimestamp").is_some(),
                    "it is there"
                );
                Ok(())
            }
        })
        .unwrap();
    }

    fn is_there(&self, name: &str) -> bool {
        self.pod(name)
            .is_ok_and(|pod| pod.pointer("/metadata/deletionTimestamp").is_none())
    }
}

/// Looks for so long whether something stays so.
fn stays(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        assert!(is_so(), "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_pod_that_is_redirected_in_time_is_told_of_and_left_alone_with_every_way_on() {
    let desk = Desk::new(Way::Delete);
    desk.start(3600, &[]);
    let uid = desk.broken("web");
    let other = desk.make("fine", &json!({}));
    desk.said
        .say(&other, Enrollment::Sidecar, PodState::Enrolled, 0);
    stays(Duration::from_secs(2), "nothing is told yet", || {
        desk.pods("repair", "fail") == 0
    });
    // Since after the run that failed.
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_counted("repair", "success", 1);
    let note = desk.event("web", "RepairBrokenPod", "Normal");
    assert!(note.contains("redirected now"), "{note}");
    desk.pass("web");
    stays(Duration::from_secs(1), "it is left alone", || {
        desk.is_there("web") && desk.pods("repair", "success") == 1
    });
}

#[test]
fn a_pod_that_stays_without_redirection_is_told_of_once_and_left_where_nothing_else_is_on() {
    let desk = Desk::new(Way::Repair);
    desk.start(1, &[]);
    desk.broken("web");
    desk.until_counted("repair", "fail", 1);
    let note = desk.event("web", "RepairBrokenPod", "Warning");
    assert!(note.contains("nf_tables is missing"), "{note}");
    stays(Duration::from_secs(3), "once", || {
        desk.pods("repair", "fail") == 1 && desk.is_there("web")
    });
    assert_eq!(desk.counted("inpod_repair_pods_amiss"), 1);
    // It has no right to more: asked for it by mistake, it is refused and says so.
    desk.node.stop("repair", Signal::SIGTERM).unwrap();
    desk.start(0, &["--delete-pods", "true"]);
    desk.until_counted("delete", "fail", 1);
    let note = desk.event("web", "DeleteBrokenPod", "Warning");
    assert!(note.contains("403") && desk.is_there("web"), "{note}");
}

#[test]
fn a_pod_that_stays_so_is_labelled_and_loses_the_label_when_it_is_redirected() {
    let desk = Desk::new(Way::Label);
    desk.start(1, &[]);
    let uid = desk.broken("web");
    desk.until_labelled("web", Some("true"));
    desk.until_counted("label", "success", 1);
    assert!(
        desk.event("web", "LabelBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_counted("repair", "success", 1);
    desk.pass("web");
    desk.until_labelled("web", None);
    assert!(desk.is_there("web"));
}

#[test]
fn a_pod_that_nobody_redirects_is_labelled_under_names_of_ones_own_and_never_deleted() {
    let desk = Desk::new(Way::Label);
    let uid = desk.make("web", &json!({}));
    desk.said.say(&uid, Enrollment::None, PodState::Out, 0);
    desk.fail("web", 126);
    desk.start(3600, &[]);
    desk.until_labelled("web", Some("true"));
    desk.until_counted("repair", "skip", 1);
    assert!(
        desk.event("web", "RepairBrokenPod", "Warning")
            .contains("NAMESPACE_EXCLUDED")
    );
    let desk = Desk::new(Way::Delete);
    let uid = desk.make("web", &json!({}));
    desk.said.say(&uid, Enrollment::None, PodState::Out, 0);
    desk.fail("web", 126);
    desk.start(0, &["--repair-pods", "false"]);
    stays(
        Duration::from_secs(3),
        "its successor would be no better",
        || desk.is_there("web"),
    );
}

#[test]
fn a_pod_whose_redirection_does_not_come_is_deleted_and_others_are_not() {
    let desk = Desk::new(Way::Delete);
    for name in ["passed", "other-code", "far", "runs"] {
        let node = if name == "far" {
            "another-node"
        } else {
            desk.node.name()
        };
        let uid = desk.make_on(node, name, &json!({}));
        desk.said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    }
    desk.pass("passed");
    desk.fail("other-code", 1);
    desk.fail("far", 126);
    desk.broken("web");
    desk.start(1, &[]);
    desk.until_gone("web");
    desk.until_counted("delete", "success", 1);
    assert!(
        desk.event("web", "DeleteBrokenPod", "Warning")
            .contains("nf_tables is missing")
    );
    let others = ["passed", "other-code", "far", "runs"];
    stays(Duration::from_secs(3), "others stay", || {
        others.iter().all(|name| desk.is_there(name))
    });
}

#[test]
fn a_pod_that_has_failed_again_although_it_is_redirected_is_deleted_without_a_wait() {
    let desk = Desk::new(Way::Delete);
    let uid = desk.make("web", &json!({}));
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 100);
    desk.fail("web", 126);
    desk.start(3600, &[]);
    desk.until_gone("web");
    assert!(
        desk.event("web", "RepairBrokenPod", "Warning")
            .contains("failed again")
    );
}

#[test]
fn a_pod_that_has_changed_since_it_was_seen_survives() {
    let desk = Desk::new(Way::Delete);
    let proxy = ApiProxy::start(desk.node.netns(), &desk.node.kubeconfig()).unwrap();
    // It is listed as broken; then its container passes, and no watch says so.
    proxy.fault(Verb::Watch, "pods", 1000, Act::Swallow);
    desk.broken("web");
    desk.start(5, &[]);
    desk.pass("web");
    eventually("its deletion was asked for", PATIENCE, || {
        ensure!(desk.pods("delete", "skip") > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    assert!(desk.is_there("web"));
    assert_eq!(desk.pods("delete", "success"), 0);
}

#[test]
fn a_watch_that_broke_is_heard_of_again_where_no_pod_changes() {
    let desk = Desk::new(Way::Repair);
    let proxy = ApiProxy::start(desk.node.netns(), &desk.node.kubeconfig()).unwrap();
    desk.start(5, &[]);
    let listed = proxy.asked(Verb::List, "pods").len();
    eventually("a watch is open", PATIENCE, || {
        ensure!(proxy.open_watches() > 0, "not yet");
        anyhow::Ok(())
    })
    .unwrap();
    proxy.fault(Verb::Watch, "pods", 1, Act::Refuse(500, None));
    proxy.cut(Cut::Broken);
    eventually(
        "the pods are listed again, and repair is ready",
        PATIENCE,
        || {
            let again = proxy.asked(Verb::List, "pods").len() - listed;
            ensure!(again > 0, "they are not listed");
            ensure!(desk.counted("inpod_repair_ready") == 1, "it is not ready");
            anyhow::Ok(())
        },
    )
    .unwrap();
}

#[test]
fn no_more_pods_are_deleted_in_a_minute_than_the_node_may() {
    let desk = Desk::new(Way::Delete);
    let names: Vec<_> = (0..6).map(|number| format!("web-{number}")).collect();
    names.iter().for_each(|name| drop(desk.broken(name)));
    desk.start(0, &["--changes-per-minute", "2"]);
    let left = || names.iter().filter(|name| desk.is_there(name)).count();
    eventually("two are deleted", PATIENCE, || {
        ensure!(left() == 4, "{} are left", left());
        anyhow::Ok(())
    })
    .unwrap();
    stays(Duration::from_secs(10), "the others wait", || left() == 4);
}

#[test]
fn only_pods_that_are_selected_are_looked_at() {
    let desk = Desk::new(Way::Delete);
    desk.broken("out");
    let uid = desk.make("in", &json!({"team": "a"}));
    desk.said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    desk.fail("in", 126);
    desk.start(
        0,
        &[
            "--label-selectors",
            "team in (a,b)",
            "--field-selectors",
            "metadata.name!=other",
        ],
    );
    desk.until_gone("in");
    stays(Duration::from_secs(2), "it is not selected", || {
        desk.is_there("out")
    });
}

#[test]
fn a_restart_forgets_how_long_and_nothing_else_and_a_killed_one_is_followed_by_the_next() {
    let desk = Desk::new(Way::Label);
    desk.broken("web");
    desk.start(3600, &[]);
    desk.node.stop("repair", Signal::SIGKILL).unwrap();
    desk.start(1, &[]);
    desk.until_labelled("web", Some("true"));
    desk.node.stop("repair", Signal::SIGTERM).unwrap();
    desk.start(1, &[]);
    desk.until_counted("label", "skip", 1);
    assert_eq!(desk.pods("label", "success"), 0);
    desk.pass("web");
    let uid = desk.pod("web").unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    desk.said
        .say(&uid, Enrollment::Sidecar, PodState::Enrolled, 2_000_000_000);
    desk.until_labelled("web", None);
}

#[test]
fn while_pod_events_is_away_nothing_is_deleted_and_afterwards_it_is() {
    let desk = Desk::new(Way::Delete);
    desk.start(0, &[]);
    let Desk { said, .. } = &desk;
    // It does not know the pod, which is no better.
    let uid = desk.make("web", &json!({}));
    desk.fail("web", 126);
    stays(Duration::from_secs(3), "who knows", || desk.is_there("web"));
    desk.until_counted("repair", "fail", 1);
    said.say(&uid, Enrollment::Sidecar, PodState::Out, 0);
    desk.until_gone("web");
}
