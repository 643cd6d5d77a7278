//! Measures the start and the memory of the services.

use std::{
    fs,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use integration::{Node, SERVICES, Spec, bin};
use nix::sys::signal::Signal;

use crate::{
    print_line,
    table::{Row, table},
};

pub(crate) fn starts(samples: usize) -> anyhow::Result<()> {
    let node = Node::new()?;
    let mut rows = SERVICES.map(Row::new);
    for _ in 0..samples {
        for row in &mut rows {
            let socket = inpod_service::socket(&node.run_dir(), row.what);
            let started = Instant::now();
            node.start(row.what)?;
            while UnixStream::connect(&socket).is_err() {
                ensure!(
                    started.elapsed() < Duration::from_secs(10),
                    "{} does not come up",
                    row.what
                );
                thread::sleep(Duration::from_micros(200));
            }
            row.times.push(started.elapsed());
            node.stop(row.what, Signal::SIGTERM)?;
        }
    }
    table(
        "Cold start of a service: exec (through nsenter) to a socket that accepts",
        &rows,
    )
}

pub(crate) fn memory() -> anyhow::Result<()> {
    let node = Node::running()?;
    print_line(
        "\n### Resident memory, KiB\n\n| pods enrolled | netconfig | ztunnel-broker | pod-events | sum |\n|---|---|---|---|---|",
    )?;
    let mut pods = Vec::new();
    for enrolled in [0_usize, 10, 100] {
        while pods.len() < enrolled {
            pods.push(node.pod(Spec::new(&format!("pod-{}", pods.len())).ambient())?);
        }
        let sizes = SERVICES
            .iter()
            .map(|service| node.resident(service))
            .collect::<Result<Vec<_>, _>>()?;
        let [netconfig, broker, pod_events] = sizes[..] else {
            anyhow::bail!("three services")
        };
        let sum = netconfig + broker + pod_events;
        print_line(&format!(
            "| {enrolled} | {netconfig} | {broker} | {pod_events} | {sum} |"
        ))?;
    }
    let plugin = fs::metadata(bin("inpod-cni")?)?.len();
    print_line(&format!("\nThe plugin has {plugin} bytes."))
}
