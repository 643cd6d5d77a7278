//! Pods from a real API server: an ADD beside one of a directory's pods, many at once, a restart, and
//! growth with the cluster.

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

#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) pods: usize,
    pub(crate) namespaces: usize,
}

/// Namespaces in the comparison's small cluster.
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

/// The unit of CPU time (proc(5), `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

fn processor_time(node: &Node, service: &str) -> anyhow::Result<Duration> {
    used(node.pid(service)?)
}

/// Returns user and system CPU time together, in steps of 10 ms.
pub(crate) fn used(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The process name may contain spaces. The state and fields 4 to 13 follow it.
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks = ticks.map(str::parse::<u32>).sum::<Result<u32, _>>()?;
    Ok(TICK * ticks)
}
