//! A real runtime's recorded calls (`plugin/tests/calls`), replayed with their exact variables; only that machine's
//! sandbox identifiers are replaced.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use integration::{Call, Node, Outcome, Pod, SERVICES, Spec, State, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, value::RawValue};

#[derive(Clone, Debug)]
struct Recorded {
    name: String,
    environment: BTreeMap<String, String>,
    stdin: String,
}

impl Recorded {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let file: Value = serde_json::from_slice(&fs::read(path)?)?;
        let environment = file.get("env").context("env")?;
        Ok(Self {
            name: path.file_stem().context("a name")?.display().to_string(),
            environment: serde_json::from_value(environment.clone())?,
            stdin: file
                .get("stdin")
                .and_then(Value::as_str)
                .context("stdin")?
                .to_owned(),
        })
    }

    fn var(&self, name: &str) -> &str {
        self.environment.get(name).map_or("", String::as_str)
    }

    fn arg(&self, key: &str) -> &str {
        let pairs = self.var("CNI_ARGS").split(';');
        let mut values = pairs.filter_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        values.next().unwrap_or_default()
    }

    fn is_for_a_pod(&self) -> bool {
        !self.arg("K8S_POD_NAMESPACE").is_empty()
    }

    fn spec(&self) -> Spec {
        let plain = Spec::new(self.arg("K8S_POD_NAME")).ambient();
        Spec {
            uid: Some(self.arg("K8S_POD_UID").to_owned())
                .filter(|uid| !uid.is_empty())
                .unwrap_or_else(|| plain.uid.clone()),
            ..plain
        }
    }

    fn for_pod(&self, node: &Node, pod: &Pod) -> Call {
        let here = |text: &str| {
            let text = text.replace(self.var("CNI_CONTAINERID"), &pod.container_id);
            let netns = self.netns_of_the_recording();
            if netns.is_empty() {
                text
            } else {
                text.replace(&netns, &pod.path().display().to_string())
            }
        };
        let environment = self.environment.iter();
        Call {
            environment: environment
                .map(|(name, value)| (name.clone(), here(value)))
                .collect(),
            stdin: with_settings(node, &addressed(&here(&self.stdin), pod)),
        }
    }

    /// Returns the variable's netns, or the result's if that is empty.
    fn netns_of_the_recording(&self) -> String {
        let stdin: Value = serde_json::from_str(&self.stdin).unwrap_or_default();
        let interfaces = stdin
            .pointer("/prevResult/interfaces")
            .and_then(Value::as_array);
        let mut sandboxes = interfaces
            .into_iter()
            .flatten()
            .filter_map(|it| it.get("sandbox")?.as_str());
        let of_result = sandboxes.next().unwrap_or_default();
        let of_variable = self.var("CNI_NETNS");
        if of_variable.is_empty() {
            of_result
        } else {
            of_variable
        }
        .to_owned()
    }
}

fn addressed(stdin: &str, pod: &Pod) -> String {
    let document: Value = serde_json::from_str(stdin).unwrap_or_default();
    let ips = document
        .pointer("/prevResult/ips")
        .and_then(Value::as_array);
    let addresses = ips
        .into_iter()
        .flatten()
        .filter_map(|ip| ip.get("address")?.as_str());
    addresses.fold(stdin.to_owned(), |text, recorded| {
        let (address, prefix) = recorded.split_once('/').unwrap_or((recorded, ""));
        let ours = if address.contains(':') {
            pod.v6.to_string()
        } else {
            pod.v4.to_string()
        };
        text.replace(&format!("\"{recorded}\""), &format!("\"{ours}/{prefix}\""))
    })
}

/// Returns the recorded conflist with this plugin's settings.
fn with_settings(node: &Node, stdin: &str) -> String {
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let ours = format!(
        "{{\"agentSocket\":{socket:?},\"stateDir\":{:?},",
        node.state_dir()
    );
    stdin.replacen('{', &ours, 1)
}

fn prev_result(call: &Call) -> String {
    let keys: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&call.stdin).unwrap();
    keys.get("prevResult")
        .expect("a chained ADD has one")
        .get()
        .to_owned()
}

fn all() -> Vec<Recorded> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin/tests/calls");
    let mut paths: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| Recorded::read(path).unwrap())
        .collect()
}

fn sandboxes() -> Vec<Vec<Recorded>> {
    let mut groups: Vec<Vec<Recorded>> = Vec::new();
    for call in all()
        .into_iter()
        .filter(|call| call.var("CNI_COMMAND") != "VERSION")
    {
        let id = call.var("CNI_CONTAINERID").to_owned();
        match groups.last_mut() {
            Some(group) if group.iter().all(|known| known.var("CNI_CONTAINERID") == id) => {
                group.push(call);
            }
            _ => groups.push(vec![call]),
        }
    }
    groups
}

fn nothing_is_held(node: &Node) -> anyhow::Result<()> {
    eventually("nothing is held", TIMEOUT, || {
        let held = (
            node.api().claims()?.len(),
            node.api().workloads()?.workloads.len(),
        );
        ensure!(held == (0, 0), "claims and workloads: {held:?}");
        anyhow::Ok(())
    })
}

fn judge(
    node: &Node,
    pod: &Pod,
    recorded: &Recorded,
    call: &Call,
    outcome: &Outcome,
) -> anyhow::Result<()> {
    ensure!(outcome.code == 0, "{outcome:?}");
    match recorded.var("CNI_COMMAND") {
        "ADD" => {
            ensure!(
                outcome.stdout == prev_result(call),
                "another result: {outcome:?}"
            );
            if recorded.is_for_a_pod() {
                return node.until_whole(&pod.spec).map(drop);
            }
            ensure!(
                pod.traces()?.is_empty(),
                "a container of no pod was captured"
            );
            nothing_is_held(node)
        }
        "CHECK" => {
            ensure!(outcome.stdout.is_empty(), "{outcome:?}");
            node.until_whole(&pod.spec).map(drop)
        }
        _ => {
            ensure!(outcome.stdout.is_empty(), "{outcome:?}");
            nothing_is_held(node)
        }
    }
}

#[test]
fn every_recorded_call_is_answered_as_the_spec_says_and_has_its_effect() {
    let node = Node::running().unwrap();
    let sandboxes = sandboxes();
    let count: usize = sandboxes.iter().map(Vec::len).sum();
    assert_eq!(
        (count, sandboxes.len()),
        (25, 9),
        "the recordings have changed"
    );
    for calls in &sandboxes {
        let first = calls.first().unwrap();
        let pod = node.sandbox(first.spec()).unwrap();
        let mut there = true;
        for recorded in calls {
            if there && recorded.var("CNI_NETNS").is_empty() {
                // The runtime did this before the call.
                pod.unmount().unwrap();
                there = false;
            }
            let call = recorded.for_pod(&node, &pod);
            let outcome = call.run().unwrap();
            let judged = judge(&node, &pod, recorded, &call, &outcome);
            judged.with_context(|| recorded.name.clone()).unwrap();
        }
        // Some sandboxes lack a recorded DEL.
        let del = first.for_pod(&node, &pod).with_var("CNI_COMMAND", "DEL");
        assert_eq!(del.run().unwrap().code, 0);
        nothing_is_held(&node).unwrap();
    }
}

#[test]
fn podmans_probe_of_the_versions_is_answered_and_touches_nothing() {
    let node = Node::running().unwrap();
    let before = State::of(&node, &[]).unwrap();
    let probes: Vec<_> = all()
        .into_iter()
        .filter(|call| call.var("CNI_COMMAND") == "VERSION")
        .collect();
    assert_eq!(probes.len(), 1);
    for probe in probes {
        assert_eq!(probe.var("CNI_IFNAME"), "dummy");
        let call = Call {
            environment: probe.environment.into_iter().collect(),
            stdin: probe.stdin,
        };
        let outcome = call.run().unwrap();
        let answer: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(
            (outcome.code, answer.get("cniVersion")),
            (0, Some(&"1.0.0".into()))
        );
        let supported = answer
            .get("supportedVersions")
            .and_then(Value::as_array)
            .unwrap();
        assert!(supported.contains(&"1.0.0".into()), "{answer}");
    }
    before.unchanged(&node, &[]).unwrap();
}

#[test]
fn the_pairs_of_cni_args_may_come_in_any_order() {
    let node = Node::running().unwrap();
    let recorded = all()
        .into_iter()
        .find(|call| call.var("CNI_COMMAND") == "ADD")
        .unwrap();
    let pod = node.sandbox(recorded.spec()).unwrap();
    let call = recorded.for_pod(&node, &pod);
    let arguments = call
        .environment
        .iter()
        .find(|(name, _)| name == "CNI_ARGS")
        .unwrap();
    let mut pairs: Vec<&str> = arguments.1.split(';').collect();
    assert_eq!(pairs.len(), 5);
    for turn in 0..10 {
        pairs.rotate_left(1);
        if turn == 5 {
            pairs.reverse();
        }
        let outcome = call
            .clone()
            .with_var("CNI_ARGS", &pairs.join(";"))
            .run()
            .unwrap();
        assert_eq!(
            (outcome.code, outcome.stdout),
            (0, prev_result(&call)),
            "{pairs:?}"
        );
    }
    node.until_whole(&pod.spec).unwrap();
    assert_eq!(node.api().claims().unwrap().len(), 1);
}

#[test]
fn after_a_reboot_the_dels_of_before_succeed_and_the_new_sandboxes_join() {
    let node = Node::running().unwrap();
    let old: Vec<_> = ["web-0", "web-1"]
        .map(|name| node.pod(Spec::new(name).ambient()).unwrap())
        .into();
    for process in SERVICES.into_iter().chain(["ztunnel"]) {
        node.stop(process, Signal::SIGKILL).unwrap();
    }
    // The plugin's state directory survives, memory does not.
    fs::remove_dir_all(node.run_dir()).unwrap();
    old.iter().for_each(|pod| pod.unmount().unwrap());
    SERVICES
        .iter()
        .for_each(|service| node.start(service).unwrap());
    node.start_ztunnel(&[]).unwrap();
    node.ready().unwrap();
    let ends = || {
        for pod in &old {
            let outcome = node.call(Call::del_again, pod).run().unwrap();
            assert_eq!((outcome.code, outcome.stdout.as_str()), (0, ""));
        }
    };
    ends();
    let new: Vec<_> = old
        .iter()
        .map(|pod| node.pod(pod.spec.clone()).unwrap())
        .collect();
    // As kubelets do: repeated when new sandboxes run.
    ends();
    for pod in &new {
        let known = node.until_whole(&pod.spec).unwrap();
        assert_eq!(known.sandbox.unwrap().container_id, pod.container_id);
    }
    assert_eq!(node.api().claims().unwrap().len(), 2);
}
