//! An ADD's phases in metrics, and its one id in all processes' logs.

use std::{collections::BTreeMap, path::PathBuf, thread, time::Duration};

use anyhow::ensure;
use integration::{
    Call, Moment, Named, Node, Proxy, Spec, Step, TIMEOUT, Verbs, eventually, number,
};

const HELD: Duration = Duration::from_millis(700);

const PHASES: [&str; 6] = ["queue", "decide", "claim", "hand-over", "rules", "other"];

struct Bench {
    proxy: Proxy,
    behind: PathBuf,
    node: Node,
    verbs: Verbs,
}

impl Bench {
    fn new() -> Self {
        let node = Node::new().unwrap();
        let behind = node.run_dir().with_file_name("behind");
        let proxy = Proxy::start(&node.run_dir(), &behind).unwrap();
        for service in ["netconfig", "ztunnel-broker"] {
            node.start_at(&behind, service, &["--peer", "uid"]).unwrap();
        }
        let settings = ["--peer", "uid", "--max-adds", "1"];
        node.start_with("pod-events", &settings).unwrap();
        node.start_ztunnel(&[]).unwrap();
        node.ready().unwrap();
        let verbs = Verbs::at(&inpod_service::socket(&node.run_dir(), "pod-events")).unwrap();
        Self {
            proxy,
            behind,
            node,
            verbs,
        }
    }

    fn metrics(&self) -> String {
        let socket = inpod_service::socket(&self.node.run_dir(), "pod-events");
        self.verbs.metrics(&socket).unwrap()
    }

    /// Returns seconds of each phase and of whole ADDs.
    fn seconds(&self) -> (BTreeMap<&'static str, f64>, f64) {
        let metrics = self.metrics();
        let sum = |phase| {
            let name =
                format!("inpod_pod_events_add_phase_duration_seconds_sum{{phase=\"{phase}\"}}");
            (phase, number(&metrics, &name))
        };
        let whole = "inpod_pod_events_add_duration_seconds_sum{outcome=\"ambient\"}";
        (PHASES.map(sum).into(), number(&metrics, whole))
    }

    /// The metrics' changes by an ADD of which one call is held.
    fn held(
        &self,
        name: &str,
        method: &'static str,
        meanwhile: bool,
    ) -> (BTreeMap<&'static str, f64>, f64) {
        let pod = self.node.sandbox(Spec::new(name).ambient()).unwrap();
        let other = self
            .node
            .sandbox(Spec::new(&format!("{name}-2")).ambient())
            .unwrap();
        for pod in [&pod, &other] {
            self.node.until_known(&pod.spec).unwrap();
        }
        let before = self.seconds();
        let held = self.proxy.hold(Step {
            method,
            moment: Moment::Before,
        });
        let mut adds = vec![self.verbs.add(&Named::of(&pod), TIMEOUT)];
        held.reached().unwrap();
        if meanwhile {
            adds.push(self.verbs.add(&Named::of(&other), TIMEOUT));
            eventually("it waits for its turn", TIMEOUT, || {
                let waiting = number(&self.metrics(), "inpod_pod_events_adds_waiting");
                ensure!(waiting > 0.5, "none does");
                anyhow::Ok(())
            })
            .unwrap();
        }
        thread::sleep(HELD);
        held.release();
        for answer in self.verbs.answers(adds).unwrap() {
            answer.result.unwrap();
        }
        let after = self.seconds();
        let at = |all: &BTreeMap<&str, f64>, phase| *all.get(phase).unwrap();
        let moved = |phase: &'static str| (phase, at(&after.0, phase) - at(&before.0, phase));
        (PHASES.map(moved).into(), after.1 - before.1)
    }
}

#[test]
fn a_step_that_is_slow_shows_in_its_phase_alone_and_all_phases_are_the_whole() {
    let bench = Bench::new();
    for (phase, method) in [
        ("claim", "ClaimNetns"),
        ("hand-over", "AddWorkload"),
        ("rules", "ApplyRules"),
    ] {
        let (moved, whole) = bench.held(&method.to_lowercase(), method, false);
        assert!(moved[phase] >= HELD.as_secs_f64(), "{method}: {moved:?}");
        for (name, seconds) in &moved {
            let is_slowest = *name == phase || *seconds < moved[phase];
            assert!(is_slowest, "{method}: {moved:?}");
        }
        let sum: f64 = moved.values().sum();
        assert!(
            (sum - whole).abs() <= 0.05 * whole,
            "{moved:?} is not {whole}"
        );
    }
}

#[test]
fn an_add_that_waits_for_its_turn_is_counted_as_queueing() {
    let bench = Bench::new();
    let (moved, whole) = bench.held("queued", "ClaimNetns", true);
    let held = HELD.as_secs_f64();
    // One is held in its claim, the later one waits in the queue.
    assert!(
        moved["claim"] >= held && moved["queue"] >= held,
        "{moved:?}"
    );
    assert!(moved["other"] < moved["queue"], "{moved:?}");
    let sum: f64 = moved.values().sum();
    assert!(
        (sum - whole).abs() <= 0.05 * whole,
        "{moved:?} is not {whole}"
    );
}

/// Returns the metrics of pod-events that its page lists.
fn documented() -> Vec<String> {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../services/docs/architecture.md"
    );
    let page = std::fs::read_to_string(page).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| row.split('`').next());
    let names = names.filter(|name| name.starts_with("inpod_pod_events_"));
    let names: Vec<_> = names.map(str::to_owned).collect();
    assert!(names.len() > 15, "{names:?}");
    names
}

#[test]
fn every_metric_that_is_documented_is_declared() {
    let bench = Bench::new();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    let add = bench.verbs.add(&Named::of(&pod), TIMEOUT);
    bench
        .verbs
        .answers(vec![add])
        .unwrap()
        .remove(0)
        .result
        .unwrap();
    let metrics = bench.metrics();
    // A counter appears with its first increment, and outputs to Kubernetes are counted only where there are any.
    let is_shown = |name: &&str| !name.ends_with("_total") && !name.contains("_annotation");
    for name in documented().iter().map(String::as_str).filter(is_shown) {
        let line = format!("# TYPE {name} ");
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
}

#[test]
fn one_id_names_an_add_in_the_logs_of_all_processes() {
    let bench = Bench::new();
    let pod = bench.node.sandbox(Spec::new("a").ambient()).unwrap();
    let socket = inpod_service::socket(&bench.behind, "pod-events");
    let call = Call::add(&pod, &socket, &bench.node.state_dir());
    let outcome = call.run().unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let (_, rest) = outcome.stderr.split_once("\"trace_id\":\"").unwrap();
    let id = &rest[..32];
    for (process, words) in [
        ("pod-events", &["Enrolled"][..]),
        ("netconfig", &["Claimed", "Applied rules"]),
        ("ztunnel-broker", &["AddWorkload"]),
    ] {
        for word in words {
            eventually(&format!("{process} logs {word} with {id}"), TIMEOUT, || {
                let log = bench.node.tail(process, 1_000);
                let lines = log
                    .lines()
                    .filter(|line| line.contains(word) && line.contains(id));
                let count = lines.count();
                ensure!(count > 0, "not in\n{log}");
                ensure!(
                    process != "pod-events" || count == 1,
                    "{count} lines for one transition"
                );
                anyhow::Ok(())
            })
            .unwrap();
        }
    }
}
