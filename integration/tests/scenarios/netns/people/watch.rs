//! The stream of changes of `inpod pods --watch`.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Stdio},
};

use anyhow::{Context as _, ensure};
use integration::{Node, Spec, TIMEOUT, connect, eventually, source_seen};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::common::mesh::{Mesh, PORT};
use crate::netns::people::{HEADER, columns, inpod};

/// The changes that `inpod pods --watch -o json` prints.
struct Watch {
    child: Child,
    output: PathBuf,
}

impl Watch {
    fn start(node: &Node, arguments: &[&str]) -> Self {
        let output = node.run_dir().with_file_name("watched");
        let file = File::create(&output).unwrap();
        let child = inpod(node)
            .args(["pods", "--watch", "-o", "json"])
            .args(arguments)
            .stdout(file)
            .spawn()
            .unwrap();
        Self { child, output }
    }

    fn states(&self, name: &str) -> anyhow::Result<Vec<String>> {
        let mut states: Vec<String> = Vec::new();
        for line in fs::read_to_string(&self.output)?.lines() {
            let event: Value = serde_json::from_str(line).context(line.to_owned())?;
            let is = |pointer: &str| event.pointer(pointer).is_some_and(|it| it == name);
            let state = event.pointer("/pod/state").and_then(Value::as_str);
            let state = match state.and_then(|state| state.strip_prefix("POD_STATE_")) {
                Some(state) if is("/pod/pod/name") => state.to_lowercase(),
                None if is("/gone/name") => "gone".to_owned(),
                _ => continue,
            };
            if states.last() != Some(&state) {
                states.push(state);
            }
        }
        Ok(states)
    }

    fn until(&self, name: &str, expected: &[&str]) {
        eventually("the watch tells it", TIMEOUT, || {
            let states = self.states(name)?;
            ensure!(states == expected, "{states:?} instead of {expected:?}");
            anyhow::Ok(())
        })
        .unwrap();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

#[test]
fn a_watch_tells_an_enrollment_and_a_withdrawal_in_their_order_and_that_the_pod_is_gone() {
    let mesh = Mesh::new().unwrap();
    let node = &mesh.node;
    let watch = Watch::start(node, &["-n", "shop"]);
    watch.until("outsider", &["out"]);
    watch.until("b", &["enrolled"]);
    let first = fs::read_to_string(&watch.output).unwrap();
    assert!(first.starts_with("{\"instanceId\":"), "{first}");
    assert!(first.contains("\n{\"stateComplete\":{}}"), "{first}");
    // No further: no ztunnel accepts the pod.
    node.stop("ztunnel", Signal::SIGKILL).unwrap();
    node.write_manifest(&mesh.outsider.spec.clone().ambient())
        .unwrap();
    watch.until("outsider", &["out", "enrolling"]);
    node.start_ztunnel(&[]).unwrap();
    watch.until("outsider", &["out", "enrolling", "enrolled"]);
    // It cannot get further here, either: a connection is captured.
    let to = (mesh.outsider.v4, PORT).into();
    let (_, captured) = source_seen(connect(&mesh.a.netns, to).unwrap()).unwrap();
    node.write_manifest(&mesh.outsider.spec).unwrap();
    watch.until("outsider", &["out", "enrolling", "enrolled", "withdrawing"]);
    drop(captured);
    watch.until(
        "outsider",
        &["out", "enrolling", "enrolled", "withdrawing", "out"],
    );
    node.write_manifest(&Spec::new("late")).unwrap();
    watch.until("late", &["out"]);
    fs::remove_file(node.manifests().join("shop-late.yaml")).unwrap();
    watch.until("late", &["out", "gone"]);
}

#[test]
fn a_watch_for_people_goes_on_with_a_line_for_each_change_and_ends_when_nobody_reads() {
    let node = Node::running().unwrap();
    let pod = node.pod(Spec::new("a")).unwrap();
    let mut child = inpod(&node)
        .args(["pods", "-w"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || columns(&lines.next().unwrap().unwrap()).join("");
    assert_eq!(next(), HEADER);
    assert_eq!(next(), "shop a out none NOT_SELECTED AGE - -");
    node.write_manifest(&pod.spec.clone().ambient()).unwrap();
    while !next().contains("a enrolled ambient LABEL_ON_POD") {}
    drop(lines);
    node.write_manifest(&pod.spec).unwrap();
    let output = eventually("it ends", TIMEOUT, || {
        child.try_wait()?.context("it goes on")
    });
    assert_eq!(output.unwrap().code(), Some(0));
}

#[test]
fn a_stream_ends_with_its_service() {
    let node = Node::running().unwrap();
    let mut watch = Watch::start(&node, &[]);
    eventually("it has begun", TIMEOUT, || {
        ensure!(
            fs::read_to_string(&watch.output)?.contains("stateComplete"),
            "not yet"
        );
        anyhow::Ok(())
    })
    .unwrap();
    node.stop("pod-events", Signal::SIGTERM).unwrap();
    let ended = eventually("it ends", TIMEOUT, || {
        watch.child.try_wait()?.context("it goes on")
    });
    assert_eq!(ended.unwrap().code(), Some(3));
}
