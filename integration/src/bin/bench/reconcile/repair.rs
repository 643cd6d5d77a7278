//! repair's memory on a node of healthy pods.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, ensure};
use integration::{ApiServer, TIMEOUT, eventually};
use tokio::runtime::Runtime;

use super::Cluster;
use crate::print_line;

/// Until repair has received all that it requested.
const SETTLED: Duration = Duration::from_secs(5);

/// Prints one row without pods, one for a full node.
pub(crate) fn repair(pods: usize) -> anyhow::Result<()> {
    let server = Arc::new(ApiServer::start()?);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let manifest = root
        .context("the crate is in a tree")?
        .join("deploy/manifests/repair.yaml");
    server.apply(&fs::read_to_string(manifest)?)?;
    print_line("\n### repair: resident memory\n\n| pods of the node, enrolled | KiB |\n|---|---|")?;
    for count in [0, pods] {
        let cluster = match count {
            0 => Cluster::empty(&server)?,
            _ => Cluster::full(&server, count)?,
        };
        let resident = resident(&cluster)?;
        print_line(&format!("| {} | {resident} |", cluster.pods()))?;
    }
    Ok(())
}

fn resident(cluster: &Cluster) -> anyhow::Result<u64> {
    let node = &cluster.node;
    let kubeconfig = node.kubeconfig().with_file_name("kubeconfig-of-repair");
    let identity = cluster.server.kubeconfig_for("inpod-repair", node.name())?;
    fs::write(&kubeconfig, identity)?;
    let path = kubeconfig.display().to_string();
    let settings = [
        "--peer",
        "uid",
        "--node-name",
        node.name(),
        "--kubeconfig",
        &path,
    ];
    node.start_with("repair", &settings)?;
    let (socket, runtime) = (
        inpod_service::socket(&node.run_dir(), "repair"),
        Runtime::new()?,
    );
    eventually("repair is ready and hears pod-events", TIMEOUT, || {
        let text = runtime.block_on(inpod_service::metrics::fetch(&socket));
        let text = text.map_err(anyhow::Error::msg)?;
        for wanted in [
            "inpod_repair_ready 1",
            "inpod_repair_condition{name=\"pod-events\"} 1",
        ] {
            ensure!(text.lines().any(|line| line == wanted), "not yet: {wanted}");
        }
        anyhow::Ok(())
    })?;
    thread::sleep(SETTLED);
    node.resident("repair")
}
