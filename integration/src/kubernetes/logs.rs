//! What is left of a failure for its reader.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Cluster, summary, text};

/// How many lines of each.
const LINES: usize = 25;

pub(super) fn told(cluster: &Cluster) -> String {
    let mut told = String::new();
    for name in ["apiserver", "kube_controller_manager", "kube_scheduler"] {
        section(&mut told, name, &cluster.log(&format!("{name}.log")));
    }
    for name in ["node", "containerd", "kubelet"] {
        let path = cluster.machine.logs().join(format!("{name}.log"));
        section(&mut told, name, &read(&path));
    }
    for path in files(&cluster.machine.pod_logs(), 3) {
        section(&mut told, &path.display().to_string(), &read(&path));
    }
    section(&mut told, "events", &events(cluster));
    let pods = cluster.server.get("/api/v1/pods").unwrap_or_default();
    let all = pods.pointer("/items").and_then(Value::as_array);
    let all: String = all.into_iter().flatten().map(summary).collect();
    section(&mut told, "pods", &all);
    told
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| error.to_string())
}

fn section(told: &mut String, name: &str, content: &str) {
    let lines: Vec<_> = content.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(LINES)..);
    writeln!(told, "--- {name}").unwrap_or_default();
    for line in tail.unwrap_or_default() {
        let short: String = line.chars().take(600).collect();
        writeln!(told, "{short}").unwrap_or_default();
    }
}

/// The files at a depth below a directory.
pub(super) fn files(dir: &Path, depth: usize) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut found: Vec<_> = match depth {
        0 => Vec::new(),
        1 => paths.filter(|path| path.is_file()).collect(),
        _ => paths.flat_map(|path| files(&path, depth - 1)).collect(),
    };
    found.sort();
    found
}

/// Who was told what, in the order of time.
fn events(cluster: &Cluster) -> String {
    let list = cluster.server.get("/api/v1/events").unwrap_or_default();
    let items = list.pointer("/items").and_then(Value::as_array);
    let mut lines: Vec<_> = items
        .into_iter()
        .flatten()
        .map(|event| {
            let of = |pointer| text(event, pointer);
            format!(
                "{} {}/{} {}: {}",
                of("/metadata/creationTimestamp"),
                of("/involvedObject/namespace"),
                of("/involvedObject/name"),
                of("/reason"),
                of("/message")
            )
        })
        .collect();
    lines.sort();
    lines.join("\n")
}
