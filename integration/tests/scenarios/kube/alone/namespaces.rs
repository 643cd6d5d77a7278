//! A label on every namespace of a large cluster.

use std::fs;

use anyhow::ensure;
use integration::{TIMEOUT, eventually};
use serde_json::json;

use crate::common::cluster::Cluster;

const NAMESPACES: usize = 500;

/// The bytes that pod-events may log about the list, which once had 1.3 MB of names.
const MAX_LOG: usize = 100_000;

#[test]
fn a_label_on_every_namespace_is_logged_in_short() {
    let cluster = Cluster::shared();
    let names = (0..NAMESPACES).map(|number| format!("many-{number}"));
    let names: Vec<_> = names.collect();
    names
        .iter()
        .for_each(|name| cluster.make_namespace(name, &json!({})));
    let label = json!({"metadata": {"labels": {"istio.io/dataplane-mode": "ambient"}}});
    for name in &names {
        let path = format!("/api/v1/namespaces/{name}");
        cluster.server.patch(&path, &label).unwrap();
    }
    let list = cluster.node.state_dir().join("enrolled-namespaces");
    eventually("every namespace is listed", TIMEOUT, || {
        let listed = fs::read_to_string(&list)?;
        let count = names
            .iter()
            .filter(|name| listed.lines().any(|line| line == *name))
            .count();
        ensure!(count == NAMESPACES, "{count} are");
        anyhow::Ok(())
    })
    .unwrap();
    let log = cluster.node.tail("pod-events", usize::MAX);
    let lines = log.lines().filter(|line| line.contains("Wrote the list"));
    let lines: Vec<_> = lines.collect();
    let length: usize = lines.iter().map(|line| line.len()).sum();
    println!("{} lists, {length} bytes of log", lines.len());
    assert!(length < MAX_LOG, "{length} bytes");
}
