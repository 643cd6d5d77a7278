//! From the start of the agent's container to the first ADD that it serves.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{
    eventually,
    kubernetes::{LONG, NODE, text},
    run,
};
use serde_json::{Value, json};

use crate::{
    agent::{AGENT, SYSTEM, Turn, named, on_the_node},
    apps::{container, create},
};

/// A pod comes each time,
const EVERY: Duration = Duration::from_millis(250);

/// until so many have come. More would take from the agent the time that is measured, and a node has room for 110.
const MOST: usize = 60;

/// A moment as it is written (RFC 3339), in seconds.
fn moment(text: &str) -> anyhow::Result<f64> {
    let seconds = run("date", &["-u", "-d", text, "+%s.%N"])?;
    Ok(seconds.trim().parse()?)
}

/// When containerd had started a container.
fn started(turn: &Turn<'_>, pod: &Value, name: &str) -> anyhow::Result<f64> {
    let statuses = pod.pointer("/status/containerStatuses");
    let statuses = statuses.and_then(Value::as_array);
    let mut found = statuses.into_iter().flatten();
    let found = found.find(|it| text(it, "/name") == name);
    let id = text(found.context("no such container")?, "/containerID");
    let id = id.strip_prefix("containerd://").context("not started")?;
    let log = std::fs::read_to_string(turn.machine.file("log/containerd.log"))?;
    let is_it = |line: &&str| {
        line.contains("StartContainer for") && line.contains(id) && line.contains("returns")
    };
    let line = log
        .lines()
        .find(is_it)
        .context("containerd does not say so")?;
    let at = line.split('"').nth(1).context("no time")?;
    moment(at)
}

/// When the ADD of a pod was served; nothing where it was not the verb that enrolled it.
fn served(turn: &Turn<'_>, name: &str) -> anyhow::Result<f64> {
    let known = turn.explain("first", name)?;
    ensure!(text(&known, "/sandbox/networkName") == "podnet", "{known}");
    let steps = known.pointer("/timeline").and_then(Value::as_array);
    let mut steps = steps.into_iter().flatten();
    let applied = steps.find(|it| text(it, "/event").starts_with("applied rules"));
    moment(text(applied.context("no rules yet")?, "/at"))
}

/// When the first ADD was served of those that were asked for and are through, by one question to the agent.
fn first_of_all(turn: &Turn<'_>) -> anyhow::Result<Option<f64>> {
    let table = turn.inpod(&["pods", "--namespace", "first", "--state", "enrolled"])?;
    let rows = table.lines().map(str::split_whitespace);
    let names = rows.filter_map(|mut row| (row.next() == Some("first")).then(|| row.next())?);
    let times = names.filter_map(|name| served(turn, name).ok());
    Ok(times.reduce(f64::min))
}

/// Asks for pods from the start of the container on. How long after it the first ADD was served, in seconds, and how many
/// were asked for.
fn first_served(turn: &Turn<'_>) -> (f64, usize) {
    let start = eventually("the container has started", LONG, || {
        let agents = turn.pods(SYSTEM, AGENT)?;
        started(turn, agents.first().context("none")?, "pod-events")
    })
    .unwrap();
    let (mut count, deadline) = (0, Instant::now() + LONG);
    loop {
        // It may not answer yet.
        if let Ok(Some(first)) = first_of_all(turn) {
            return (first - start, count);
        }
        assert!(Instant::now() < deadline, "no ADD was served");
        if count < MOST {
            create(
                turn,
                "first",
                &format!("web-{count}"),
                &json!({"nodeName": NODE}),
                &container(&json!({})),
            );
            count += 1;
        }
        thread::sleep(EVERY);
    }
}

#[test]
fn the_first_add_is_served_within_seconds_of_the_start_of_the_agent_s_container() {
    on_the_node(|turn| {
        turn.make_namespace("first", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let before = turn.agent();
        let (namespace, name) = named(&before);
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        turn.server.delete_with(&path, &json!({})).unwrap();
        let (first, count) = first_served(turn);
        eprintln!(
            "first ADD served {first:.2} s after the start of the container pod-events; {count} pods asked, one each {EVERY:?}"
        );
        assert!((0.0..30.0).contains(&first), "{first}");
        turn.until_whole();
        eventually("the pods that were asked for run", LONG, || {
            let pods = turn.pods("first", "")?;
            ensure!(
                pods.iter()
                    .all(|pod| integration::kubernetes::is(pod, "Ready")),
                "not yet"
            );
            anyhow::Ok(())
        })
        .unwrap();
        turn.remove("first");
    });
}
