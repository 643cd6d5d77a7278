//! Growth with the cluster's namespaces: pod-events' memory and its cost of an event.

use std::time::Duration;

use serde_json::json;

use super::{
    Cluster, processor_time,
    restart::{self, Metrics},
};
use crate::print_line;

/// Changes of one pod's label.
const CHANGES: u32 = 200;

pub(super) fn scale(samples: usize, clusters: &[(&Cluster, usize); 2]) -> anyhow::Result<()> {
    let mut sizes = Vec::new();
    for (cluster, _) in clusters {
        let enrolled = cluster.node.resident("pod-events")?;
        restart::one(cluster, &Metrics::of(cluster)?, cluster.pods())?;
        sizes.push([enrolled, cluster.node.resident("pod-events")?]);
    }
    let rounds = u32::try_from(samples.div_ceil(20))?;
    let mut times = [Duration::ZERO; 2];
    for round in 0..rounds {
        for ((cluster, _), time) in clusters.iter().zip(&mut times) {
            *time += changes(cluster, round)?;
        }
    }
    let count = rounds * CHANGES;
    print_line(&format!(
        "\n### pod-events in a larger cluster: resident memory, and processor time for each of {count} changes of a pod's \
         label, in turns of {CHANGES}\n\n| pods | namespaces | KiB, pods just enrolled | after a restart | after the changes \
         | us per change |\n|---|---|---|---|---|---|"
    ))?;
    for (((cluster, namespaces), [enrolled, restarted]), time) in
        clusters.iter().zip(sizes).zip(times)
    {
        let last = cluster.node.resident("pod-events")?;
        let each = (time / count).as_micros();
        let pods = cluster.pods();
        print_line(&format!(
            "| {pods} | {namespaces} | {enrolled} | {restarted} | {last} | {each} |"
        ))?;
    }
    Ok(())
}

/// A pod created afterwards shows when pod-events has seen the last change.
fn changes(cluster: &Cluster, round: u32) -> anyhow::Result<Duration> {
    let changes = (0..CHANGES).map(|number| {
        let label = json!({"changed": format!("{round}-{number}")});
        (
            cluster.path("web-0"),
            json!({"metadata": {"labels": label}}),
        )
    });
    let changes: Vec<_> = changes.collect();
    let before = processor_time(&cluster.node, "pod-events")?;
    cluster.server.patch_all(&changes)?;
    let last = format!("last-{round}");
    cluster.create_all(std::slice::from_ref(&last))?;
    cluster.until_shown(&last)?;
    let after = processor_time(&cluster.node, "pod-events")?;
    cluster.server.delete(&cluster.path(&last))?;
    Ok(after.saturating_sub(before))
}
