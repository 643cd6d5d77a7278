//! From a restart of pod-events on a full node until all three services have verified every pod.

use std::{
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::ensure;
use integration::{SERVICES, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use tokio::runtime::Runtime;

use super::{Cluster, processor_time};
use crate::{
    print_line,
    table::{Row, record, table},
};

/// After this silence, no writes follow.
const SETTLE: Duration = Duration::from_secs(2);

pub(super) fn restart(samples: usize, cluster: &Cluster) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("wall time"),
        Row::new("processor time, the three services together"),
        Row::new("of that, pod-events (with its start)"),
        Row::new("of that, netconfig"),
        Row::new("of that, ztunnel-broker"),
    ];
    let pods = cluster.pods();
    let metrics = Metrics::of(cluster)?;
    for _ in 0..samples {
        record(&mut rows, one(cluster, &metrics, pods)?);
    }
    table(
        &format!("Restart of pod-events beside {pods} enrolled pods, until each is verified"),
        &rows,
    )?;
    print_line("\nNothing was written: no Kubernetes object, and no rule that the kernel reported.")
}

/// Fails if the restart writes anything.
pub(super) fn one(
    cluster: &Cluster,
    metrics: &Metrics,
    pods: usize,
) -> anyhow::Result<[Duration; 5]> {
    let node = &cluster.node;
    let before = settled(cluster, metrics)?;
    // The counters work: enrollment has increased them.
    ensure!(before.0 > 0 && before.1 > 0, "{before:?} writes at first");
    let verified = metrics.sum(VERIFIED)?;
    let [netconfig, broker, pod_events] = SERVICES;
    node.stop(pod_events, Signal::SIGTERM)?;
    let spent = |service| processor_time(node, service);
    let (netconfig_before, broker_before) = (spent(netconfig)?, spent(broker)?);
    let began = Instant::now();
    node.start(pod_events)?;
    eventually("every pod is verified", TIMEOUT, || {
        let more = metrics.sum(VERIFIED)? - verified;
        ensure!(more >= u64::try_from(pods)?, "{more} are");
        anyhow::Ok(())
    })?;
    let took = began.elapsed();
    let own = spent(pod_events)?;
    let netconfig = spent(netconfig)?.saturating_sub(netconfig_before);
    let broker = spent(broker)?.saturating_sub(broker_before);
    node.ready()?;
    let after = settled(cluster, metrics)?;
    ensure!(after == before, "{before:?} writes before, {after:?} after");
    Ok([took, own + netconfig + broker, own, netconfig, broker])
}

/// Returns changed objects and kernel notifications, once they no longer grow.
fn settled(cluster: &Cluster, metrics: &Metrics) -> anyhow::Result<(usize, u64)> {
    let written = || {
        let changes = cluster.server.changes_in(cluster.namespace())?.len();
        anyhow::Ok((changes, metrics.sum(CHANGES)?))
    };
    eventually("nothing more is written", TIMEOUT, || {
        let before = written()?;
        sleep(SETTLE);
        let after = written()?;
        ensure!(after == before, "{before:?}, then {after:?}");
        Ok(after)
    })
}

const VERIFIED: &str =
    "inpod_netconfig_rules_duration_seconds_count{operation=\"verify\",result=\"OK\"}";
/// The kernel's notifications from pods' netns.
const CHANGES: &str = "inpod_netconfig_drift_events_total{netns=\"claimed\"}";

pub(super) struct Metrics {
    runtime: Runtime,
    socket: PathBuf,
}

impl Metrics {
    pub(super) fn of(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self {
            runtime: Runtime::new()?,
            socket: inpod_service::socket(&cluster.node.run_dir(), "netconfig"),
        })
    }

    fn sum(&self, prefix: &str) -> anyhow::Result<u64> {
        let fetched = self
            .runtime
            .block_on(inpod_service::metrics::fetch(&self.socket));
        let text = fetched.map_err(anyhow::Error::msg)?;
        let lines = text.lines().filter(|line| line.starts_with(prefix));
        let numbers = lines.filter_map(|line| line.rsplit_once(' '));
        Ok(numbers
            .map(|(_, number)| number.parse::<u64>())
            .sum::<Result<_, _>>()?)
    }
}
