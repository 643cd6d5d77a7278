use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use crate::{Node, Pod, SERVICES, eventually, pod::exec_in};

/// The time for the resources of a call to close. The end of a connection is reported, but the services do not wait for
/// it.
const SETTLE: Duration = Duration::from_secs(5);

/// The time without a change after which the state counts as stable: ends of connections and a first verification
/// follow shortly after an answer, and would look like a loss.
const QUIET: Duration = Duration::from_millis(500);

/// Everything that a call could change on a node, as lines: rules, routes and ip rules of node and pods, claims,
/// workloads, checkpoint and spool, and for each service the open namespaces, the namespaces of the threads, and the
/// number of descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State(BTreeSet<String>);

impl State {
    /// Records the state, once the state no longer changes.
    pub fn of(node: &Node, pods: &[&Pod]) -> anyhow::Result<Self> {
        let mut last = Self::now(node, pods)?;
        let mut since = Instant::now();
        eventually("nothing changes", SETTLE, || {
            let now = Self::now(node, pods)?;
            if now != last {
                last = now;
                since = Instant::now();
            }
            ensure!(
                since.elapsed() >= QUIET,
                "it changed {:?} ago",
                since.elapsed()
            );
            anyhow::Ok(last.clone())
        })
    }

    fn now(node: &Node, pods: &[&Pod]) -> anyhow::Result<Self> {
        let mut lines = BTreeSet::new();
        let netns = pods.iter().map(|pod| (pod.spec.name.as_str(), pod.path()));
        for (name, path) in netns.chain([("the node", node.netns().path())]) {
            lines.extend(network(path)?.map(|line| format!("{name}: {line}")));
        }
        lines.extend(claims(node)?);
        lines.extend(files(
            "checkpoint",
            &node.run_dir().join("pod-events/pods"),
        )?);
        lines.extend(files("spool", &node.state_dir().join("spool"))?);
        for service in SERVICES {
            lines.extend(process(service, node.pid(service)?)?);
        }
        Ok(Self(lines))
    }

    /// Waits until the state is the same again; an error names the differences.
    pub fn unchanged(&self, node: &Node, pods: &[&Pod]) -> anyhow::Result<()> {
        eventually("everything is as it was", SETTLE, || {
            let now = Self::now(node, pods)?;
            let new: Vec<_> = now.0.difference(&self.0).collect();
            let gone: Vec<_> = self.0.difference(&now.0).collect();
            ensure!(
                new.is_empty() && gone.is_empty(),
                "new: {new:#?}, gone: {gone:#?}"
            );
            anyhow::Ok(())
        })
    }
}

fn network(path: &Path) -> anyhow::Result<impl Iterator<Item = String>> {
    let commands: [&[&str]; 5] = [
        &["nft", "-s", "list", "ruleset"],
        &["ip", "rule"],
        &["ip", "-6", "rule"],
        &["ip", "route", "show", "table", "all"],
        &["ip", "-6", "route", "show", "table", "all"],
    ];
    let mut text = String::new();
    for command in commands {
        text += &exec_in(path, command)?;
    }
    // The kernel adds its own routes some time after an interface is up.
    let ours = |line: &&str| !line.contains("proto kernel");
    let lines: Vec<_> = text.lines().filter(ours).map(str::to_owned).collect();
    Ok(lines.into_iter())
}

fn claims(node: &Node) -> anyhow::Result<Vec<String>> {
    let claims = node.api().claims()?;
    let workloads = node.api().workloads()?.workloads;
    let claims = claims.iter().map(|claim| format!("claim {claim:?}"));
    let workloads = workloads
        .iter()
        .map(|status| format!("workload {:?}", status.workload));
    Ok(claims.chain(workloads).collect())
}

fn files(what: &str, directory: &Path) -> anyhow::Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let mut lines = Vec::new();
    for entry in entries {
        let path = entry?.path();
        // A file that has disappeared counts as empty; the next poll notices the change.
        let content = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        lines.push(format!("{what} {}: {content}", path.display()));
    }
    Ok(lines)
}

/// Returns the open descriptors of a process, and the namespaces of its threads.
fn process(name: &str, pid: u32) -> anyhow::Result<Vec<String>> {
    let own = fs::metadata(format!("/proc/{pid}/ns/net"))
        .with_context(|| format!("{name} has ended"))?
        .ino();
    let mut kinds = BTreeMap::<String, u32>::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let link = fs::read_link(entry?.path()).unwrap_or_default();
        let link = link.display().to_string();
        // The number of these descriptors varies with a connection pool and a runtime.
        let kind = link.split_once(':').map_or("file", |(kind, _)| kind);
        let key = if link.starts_with("/run/netns") || kind == "net" {
            link
        } else {
            kind.to_owned()
        };
        *kinds.entry(key).or_default() += 1;
    }
    let mut lines: Vec<_> = kinds
        .into_iter()
        .map(|(kind, count)| format!("{name} holds {count} of {kind}"))
        .collect();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        match fs::metadata(path.join("ns/net")) {
            Ok(found) if found.ino() != own => lines.push(format!("{name} has a thread abroad")),
            // The thread is in the namespace of its process, or has ended.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(lines)
}
