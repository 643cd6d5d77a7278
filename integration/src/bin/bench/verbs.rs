//! CNI verbs, from exec to exit.

use std::{thread, time::Duration};

use anyhow::ensure;
use integration::{Call, Node, Pod, Spec, TIMEOUT, bin, eventually, run};

use crate::table::{Row, record, table, timed};

pub(crate) fn verbs(samples: usize) -> anyhow::Result<()> {
    let node = Node::running()?;
    let bare = bin("bare")?.display().to_string();
    let socket = inpod_service::socket(&node.run_dir(), "pod-events");
    let socket = socket.display().to_string();
    let mut rows = [
        Row::new("DEL of a sandbox that nobody knows: the plugin's cold start and one call"),
        Row::new("a bare tonic client of the same profile, the same call"),
        Row::new("VERSION: no call"),
        Row::new("`/bin/true`, for scale"),
        Row::new("ADD of a pod outside the mesh"),
        Row::new("ADD of an enrolled pod"),
        Row::new("DEL of an enrolled pod"),
    ];
    for _ in 0..samples {
        let outside = node.sandbox(Spec::new("outside"))?;
        let inside = node.sandbox(Spec::new("inside").ambient())?;
        known(&node, &outside.spec)?;
        known(&node, &inside.spec)?;
        let times = [
            took(&node.call(Call::del, &inside))?,
            timed(|| run(&bare, &[&socket]).map(drop))?,
            took(&version())?,
            timed(|| run::<&str>("/bin/true", &[]).map(drop))?,
            took(&node.call(Call::add, &outside))?,
            took(&node.call(Call::add, &inside))?,
            took(&node.call(Call::del, &inside))?,
        ];
        record(&mut rows, times);
        inside.unmount()?;
        node.del(&outside)?;
    }
    table(
        "CNI verbs, exec to exit, with a reference ztunnel connected",
        &rows,
    )
}

/// Measures ADD beside few and many enrolled pods, alternating.
pub(crate) fn crowd(samples: usize) -> anyhow::Result<()> {
    let mut rows = [
        Row::new("ADD of an enrolled pod, on a node with 10"),
        Row::new("the same on a node with 500"),
    ];
    let nodes = [crowded(10)?, crowded(500)?];
    for _ in 0..samples {
        for ((node, _pods), row) in nodes.iter().zip(&mut rows) {
            let pod = node.sandbox(Spec::new("one-more").ambient())?;
            known(node, &pod.spec)?;
            row.times.push(took(&node.call(Call::add, &pod))?);
            node.del(&pod)?;
        }
    }
    table("The same ADD on a fuller node", &rows)
}

fn crowded(pods: usize) -> anyhow::Result<(Node, Vec<Pod>)> {
    let node = Node::running()?;
    let pods = (0..pods).map(|number| node.pod(Spec::new(&format!("pod-{number}")).ambient()));
    let pods = pods.collect::<Result<_, _>>()?;
    Ok((node, pods))
}

/// Before an ADD, the directory of manifests is read once more for a file's last event.
const READ: Duration = Duration::from_millis(200);

/// Waits for the source: the time to read manifests is not part of an ADD.
pub(crate) fn known(node: &Node, spec: &Spec) -> anyhow::Result<()> {
    eventually("the pod is known", TIMEOUT, || {
        let known = node.explain(spec)?;
        let uid = known.pod.map(|pod| pod.uid).unwrap_or_default();
        ensure!(uid == spec.uid, "it is not");
        anyhow::Ok(())
    })?;
    thread::sleep(READ);
    Ok(())
}

fn version() -> Call {
    Call {
        environment: vec![("CNI_COMMAND".to_owned(), "VERSION".to_owned())],
        stdin: r#"{"cniVersion":"1.0.0"}"#.to_owned(),
    }
}

pub(crate) fn took(call: &Call) -> anyhow::Result<Duration> {
    let outcome = call.run()?;
    ensure!(outcome.code == 0, "{outcome:?}");
    Ok(outcome.took)
}
