//! Collects logs and Events that explain a failure.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Cluster, summary, text};

const LINES: usize = 25;

pub(super) fn diagnostics(cluster: &Cluster) -> String {
    let mut diagnostics = String::new();
    for name in ["apiserver", "kube_controller_manager", "kube_scheduler"] {
        section(&mut diagnostics, name, &cluster.log(&format!("{name}.log")));
    }
    for machine in cluster.machines() {
        for name in ["node", "containerd", "kubelet", "kube-proxy"] {
            let path = machine.logs().join(format!("{name}.log"));
            let title = format!("{} of {}", name, machine.node.name());
            section(&mut diagnostics, &title, &read(&path));
        }
        for path in files(&machine.pod_logs(), 3) {
            section(&mut diagnostics, &path.display().to_string(), &read(&path));
        }
    }
    section(&mut diagnostics, "events", &events(cluster));
    let pods = cluster.server.get("/api/v1/pods").unwrap_or_default();
    let all = pods.pointer("/items").and_then(Value::as_array);
    let all: String = all.into_iter().flatten().map(summary).collect();
    section(&mut diagnostics, "pods", &all);
    diagnostics
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| error.to_string())
}

fn section(diagnostics: &mut String, name: &str, content: &str) {
    let lines: Vec<_> = content.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(LINES)..);
    writeln!(diagnostics, "--- {name}").unwrap_or_default();
    for line in tail.unwrap_or_default() {
        let short: String = line.chars().take(600).collect();
        writeln!(diagnostics, "{short}").unwrap_or_default();
    }
}

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
