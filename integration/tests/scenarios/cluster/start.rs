//! Measures from the start of the agent's container to its first ADD.

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

use crate::cluster::{
    agent::{AGENT, ExclusiveCluster, SYSTEM, named, on_the_node, status_of},
    apps::{container, create},
};

const INTERVAL: Duration = Duration::from_millis(250);

/// More would take CPU time from the measured agent; a node has room for 110.
const MAX_PODS: usize = 60;

fn parse_time(text: &str) -> anyhow::Result<f64> {
    let seconds = run("date", &["-u", "-d", text, "+%s.%N"])?;
    Ok(seconds.trim().parse()?)
}

fn started(cluster: &ExclusiveCluster<'_>, pod: &Value, name: &str) -> anyhow::Result<f64> {
    let id = text(status_of(pod, name)?, "/containerID");
    let id = id.strip_prefix("containerd://").context("not started")?;
    let log = std::fs::read_to_string(cluster.machine().file("log/containerd.log"))?;
    let is_it = |line: &&str| {
        line.contains("StartContainer for") && line.contains(id) && line.contains("returns")
    };
    let line = log
        .lines()
        .find(is_it)
        .context("containerd does not say so")?;
    let at = line.split('"').nth(1).context("no time")?;
    parse_time(at)
}

/// Fails if no ADD enrolled the pod.
fn served(cluster: &ExclusiveCluster<'_>, name: &str) -> anyhow::Result<f64> {
    let known = cluster.explain("first", name)?;
    ensure!(text(&known, "/sandbox/networkName") == "podnet", "{known}");
    let steps = known.pointer("/timeline").and_then(Value::as_array);
    let mut steps = steps.into_iter().flatten();
    let applied = steps.find(|it| text(it, "/event").starts_with("applied rules"));
    parse_time(text(applied.context("no rules yet")?, "/at"))
}

/// Returns the first ADD that was served, with one call to the agent.
fn first_of_all(cluster: &ExclusiveCluster<'_>) -> anyhow::Result<Option<f64>> {
    let table = cluster.inpod(&["pods", "--namespace", "first", "--state", "enrolled"])?;
    let rows = table.lines().map(str::split_whitespace);
    let names = rows.filter_map(|mut row| (row.next() == Some("first")).then(|| row.next())?);
    let times = names.filter_map(|name| served(cluster, name).ok());
    Ok(times.reduce(f64::min))
}

/// Creates pods from the container's start on. Returns the seconds until the first ADD was served, and
/// the number of pods.
fn first_served(cluster: &ExclusiveCluster<'_>) -> (f64, usize) {
    let start = eventually("the container has started", LONG, || {
        let agents = cluster.pods(SYSTEM, AGENT)?;
        started(cluster, agents.first().context("none")?, "pod-events")
    })
    .unwrap();
    let (mut count, deadline) = (0, Instant::now() + LONG);
    loop {
        // It may not answer yet.
        if let Ok(Some(first)) = first_of_all(cluster) {
            return (first - start, count);
        }
        assert!(Instant::now() < deadline, "no ADD was served");
        if count < MAX_PODS {
            create(
                cluster,
                "first",
                &format!("web-{count}"),
                &json!({"nodeName": NODE}),
                &container(&json!({})),
            );
            count += 1;
        }
        thread::sleep(INTERVAL);
    }
}

#[test]
fn the_first_add_is_served_within_seconds_of_the_start_of_the_agent_s_container() {
    on_the_node(|cluster| {
        cluster
            .make_namespace("first", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let before = cluster.agent();
        let (namespace, name) = named(&before);
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        cluster.server.delete_with(&path, &json!({})).unwrap();
        let (first, count) = first_served(cluster);
        eprintln!(
            "first ADD served {first:.2} s after the start of the container pod-events; {count} pods asked, one each {INTERVAL:?}"
        );
        assert!((0.0..30.0).contains(&first), "{first}");
        cluster.until_whole();
        eventually("the pods that were asked for run", LONG, || {
            let pods = cluster.pods("first", "")?;
            ensure!(
                pods.iter()
                    .all(|pod| integration::kubernetes::is(pod, "Ready")),
                "not yet"
            );
            anyhow::Ok(())
        })
        .unwrap();
        cluster.remove("first");
    });
}
