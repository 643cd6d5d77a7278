//! Sidecar pods without an ADD, beside the real pod-events and netconfig: their init container is the real
//! `validate`, run as the proxy's user.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, ensure};
use inpod_proto::podevents::v1::PodState;
use integration::{Cgroups, Inhabitant, Pod, Spec, TIMEOUT, bin_for_all, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::kube::repair::{
    fixture::{Action, Fixture, LABEL},
    stays,
};

const MODE: &str = "sidecar.istio.io/interceptionMode";

/// pod-events searches at least every 30 s for an undiscovered pod.
const FOUND: Duration = Duration::from_secs(60);

const NOTHING: Vec<String> = Vec::new();

/// The sandbox of `web` was created without the plugin.
struct Missed<'a> {
    fixture: &'a Fixture,
    pod: Pod,
    // Dropped before its cgroup is removed.
    _process: Inhabitant,
    _cgroups: Cgroups,
}

impl<'a> Missed<'a> {
    fn new(fixture: &'a Fixture, mode: Option<&str>) -> Self {
        let uid = fixture.create(&object(fixture, mode));
        let spec = Spec {
            namespace: fixture.namespace.clone(),
            uid,
            ..Spec::new("web")
        };
        let pod = fixture.node.sandbox(spec).unwrap();
        let cgroups = Cgroups::new().unwrap();
        let process = Inhabitant::of(&pod).unwrap();
        cgroups.put(&pod, process.pid()).unwrap();
        let all = pod.addresses().map(|address| json!({"ip": address}));
        let status = json!({"status": {"phase": "Pending", "podIP": pod.v4, "podIPs": all}});
        let path = format!("{}/status", fixture.path("web"));
        fixture.server.patch(&path, &status).unwrap();
        Self {
            fixture,
            pod,
            _process: process,
            _cgroups: cgroups,
        }
    }

    fn validate(&self) -> i32 {
        let net = format!("--net={}", self.pod.path().display());
        let ended = Command::new("nsenter")
            .args([&net, "setpriv", "--no-new-privs", "--bounding-set=-all"])
            .args(["--inh-caps=-all", "--clear-groups"])
            .args(["--reuid", "1337", "--regid", "1337"])
            .arg(bin_for_all("validate").unwrap())
            .args(["--timeout", "2s"])
            .env_clear()
            .output()
            .unwrap();
        ended.status.code().unwrap()
    }

    fn annotate(&self, mode: &str) {
        let change = json!({"metadata": {"annotations": {MODE: mode}}});
        let Fixture { server, .. } = self.fixture;
        server.patch(&self.fixture.path("web"), &change).unwrap();
    }

    fn until_redirected(&self) {
        eventually("it is redirected", FOUND, || {
            let known = self.fixture.node.explain(&self.pod.spec)?;
            ensure!(known.state() == PodState::Enrolled, "{known:?}");
            let rules = known.rules.context("no rules reported")?;
            ensure!(rules.differences.is_empty(), "{:?}", rules.differences);
            anyhow::Ok(())
        })
        .unwrap();
    }

    /// pod-events cannot apply the annotation and reports that.
    fn until_refused(&self) {
        eventually("the failure is reported", FOUND, || {
            let known = self.fixture.node.explain(&self.pod.spec)?;
            let failure = known.last_failure.context("no failure")?;
            ensure!(failure.field == MODE, "{failure:?}");
            anyhow::Ok(())
        })
        .unwrap();
        assert_eq!(self.pod.traces().unwrap(), NOTHING);
    }
}

fn object(fixture: &Fixture, mode: Option<&str>) -> Value {
    let proxy = json!({"name": "istio-proxy", "image": "proxyv2", "args": ["proxy", "sidecar"],
        "securityContext": {"runAsUser": 1337, "runAsGroup": 1337}});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "web",
            "namespace": fixture.namespace,
            "annotations": {"sidecar.istio.io/status": "{}", MODE: mode.unwrap_or("REDIRECT")},
        },
        "spec": {
            "nodeName": fixture.node.name(),
            "initContainers": [{"name": "istio-validation", "image": "validate"}],
            "containers": [{"name": "app", "image": "app"}, proxy],
        },
    })
}

/// Returns pod-events' Events with the reason for malformed settings.
fn events(fixture: &Fixture) -> Vec<Value> {
    let namespace = &fixture.namespace;
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    let all = fixture.server.get(&path).unwrap();
    let all = all.pointer("/items").and_then(Value::as_array).unwrap();
    let of_pod_events = all.iter().filter(|event| {
        event["reason"] == "InvalidField"
            && event["reportingController"] == "inpod.io/pod-events"
            && event.pointer("/regarding/name") == Some(&"web".into())
    });
    of_pod_events.cloned().collect()
}

#[test]
fn one_that_failed_its_validation_is_redirected_in_place_passes_and_is_left_alone_with_every_way_on()
 {
    let fixture = Fixture::real(Action::Delete);
    fixture.start(3600, &["--label-pods", "true"]);
    fixture.node.stop("netconfig", Signal::SIGKILL).unwrap();
    let missed = Missed::new(&fixture, None);
    let code = missed.validate();
    assert_eq!(code, 126);
    fixture.fail("web", code);
    stays(
        Duration::from_secs(3),
        "nobody can redirect it, and it is given time",
        || fixture.pods("repair", "success") + fixture.pods("repair", "fail") == 0,
    );
    assert_eq!(missed.pod.traces().unwrap(), NOTHING);
    fixture.node.start("netconfig").unwrap();
    missed.until_redirected();
    fixture.until_counted("repair", "success", 1);
    let note = fixture.event("web", "RepairBrokenPod", "Normal");
    assert!(note.contains("redirected now"), "{note}");
    assert_eq!(missed.validate(), 0);
    fixture.pass("web");
    stays(Duration::from_secs(2), "it is left alone", || {
        fixture.is_there("web") && fixture.pods("repair", "success") == 1
    });
    for action in ["label", "delete"] {
        for came in ["success", "skip", "fail"] {
            assert_eq!(fixture.pods(action, came), 0, "{action} {came}");
        }
    }
    assert_eq!(fixture.pod("web").unwrap().pointer(LABEL), None);
    assert_eq!(fixture.counted("inpod_repair_pods_amiss"), 0);
}

#[test]
fn one_whose_annotation_is_malformed_is_labelled_with_that_and_loses_the_label_when_it_is_corrected()
 {
    let fixture = Fixture::real(Action::Label);
    let missed = Missed::new(&fixture, Some("nft"));
    fixture.fail("web", missed.validate());
    missed.until_refused();
    fixture.start(1, &[]);
    fixture.until_labelled("web", Some("true"));
    fixture.until_counted("repair", "fail", 1);
    for reason in ["RepairBrokenPod", "LabelBrokenPod"] {
        let note = fixture.event("web", reason, "Warning");
        assert!(note.contains(MODE), "{reason}: {note}");
    }
    assert_eq!(missed.pod.traces().unwrap(), NOTHING);
    missed.annotate("REDIRECT");
    missed.until_redirected();
    fixture.until_counted("repair", "success", 1);
    fixture.pass("web");
    fixture.until_labelled("web", None);
    assert_eq!(missed.validate(), 0);
    assert!(fixture.is_there("web"));
}

#[test]
fn one_whose_annotation_is_malformed_is_deleted_where_that_is_on() {
    let fixture = Fixture::real(Action::Delete);
    let missed = Missed::new(&fixture, Some("nft"));
    fixture.fail("web", missed.validate());
    missed.until_refused();
    fixture.start(1, &[]);
    fixture.until_gone("web");
    fixture.until_counted("delete", "success", 1);
    let note = fixture.event("web", "DeleteBrokenPod", "Warning");
    assert!(note.contains(MODE), "{note}");
}

/// pod-events retries repeatedly but reports once.
#[test]
fn what_is_malformed_of_a_pod_that_runs_is_one_event_with_the_annotations_name() {
    let fixture = Fixture::real(Action::Repair);
    let missed = Missed::new(&fixture, Some("nft"));
    missed.until_refused();
    let event = eventually("it is reported", TIMEOUT, || {
        events(&fixture).into_iter().next().context("no Event")
    })
    .unwrap();
    assert_eq!(event["type"], "Warning");
    let note = event["note"].as_str().unwrap();
    assert!(note.contains(MODE) && note.contains("; give "), "{note}");
    stays(Duration::from_secs(5), "it is reported once", || {
        let all = events(&fixture);
        all.len() == 1 && all.iter().all(|event| event["series"].is_null())
    });
}
