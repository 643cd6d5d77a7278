//! Measures pods from Kubernetes: an ADD beside one of a directory's pods, many at once, a restart, and what grows
//! with the cluster. The API server is real.

mod adds;
mod cluster;
mod repair;
mod restart;
mod scale;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use integration::{ApiServer, Node};

use cluster::Cluster;
pub(crate) use repair::repair;

/// The number of pods on a node, and of namespaces in its cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) pods: usize,
    pub(crate) namespaces: usize,
}

/// The number of namespaces in the small cluster of the comparison.
const FEW: usize = 10;

pub(crate) fn reconcile(samples: usize, size: Size) -> anyhow::Result<()> {
    let small = Arc::new(ApiServer::start()?);
    adds::one(samples, &small)?;
    adds::burst(samples, &small)?;
    cluster::fill(&small, FEW)?;
    let few = Cluster::full(&small, size.pods)?;
    restart::restart(samples.min(20), &few)?;
    let large = Arc::new(ApiServer::start()?);
    cluster::fill(&large, size.namespaces)?;
    let many = Cluster::full(&large, size.pods)?;
    scale::scale(samples, &[(&few, FEW), (&many, size.namespaces)])
}

/// The kernel's unit of a process's CPU time (proc(5), `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

fn processor_time(node: &Node, service: &str) -> anyhow::Result<Duration> {
    used(node.pid(service)?)
}

/// Returns the CPU time of a process, user and system together, with a resolution of 10 ms.
pub(crate) fn used(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The process name before it may contain spaces. The state and then fields 4 to 13 follow it.
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks = ticks.map(str::parse::<u32>).sum::<Result<u32, _>>()?;
    Ok(TICK * ticks)
}
