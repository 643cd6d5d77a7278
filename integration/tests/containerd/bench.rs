//! Measures the plugin's cost: RunPodSandbox alternately on two nodes that differ only by the plugin. Run it through
//! `integration/bench/run SAMPLES containerd`; the tier takes a few samples as a check.

use std::{
    io::{self, Write as _},
    thread,
    time::{Duration, Instant},
};

use inpod_proto::podevents::v1::PodState;
use integration::{Node, Spec};

use crate::{chain::PRIMARY, runtime::Runtime, sandboxes::in_the_mesh};

/// A changed directory of manifests has certainly been read by then.
const READ: Duration = Duration::from_millis(200);

#[expect(
    clippy::disallowed_methods,
    reason = "integration/bench/run tells how many"
)]
fn samples() -> usize {
    let samples = std::env::var("INPOD_BENCH_SAMPLES");
    samples.map_or(3, |text| text.parse().expect("a number"))
}

/// Runs, inspects and removes a sandbox; returns RunPodSandbox's duration.
fn time_run(runtime: &Runtime, spec: &Spec, look: impl FnOnce(&str)) -> Duration {
    runtime.node.write_manifest(spec).unwrap();
    thread::sleep(READ);
    let config = runtime.config(spec);
    let began = Instant::now();
    let id = runtime.cri.run(config).unwrap();
    let took = began.elapsed();
    look(&id);
    runtime.end(&id).unwrap();
    took
}

fn quantile(times: &[Duration], share: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort();
    let index = (sorted.len() - 1) * share / 100;
    sorted.get(index).unwrap().as_secs_f64() * 1e3
}

#[test]
fn what_the_plugin_adds_to_a_sandbox_is_measured_beside_one_without_it() {
    if !integration::is_long_run() {
        return;
    }
    let bare = Runtime::on(Node::new().unwrap()).unwrap();
    let list = bare.chain.list("1.0.0", None);
    bare.chain.write(PRIMARY, &list).unwrap();
    bare.until_chained(false).unwrap();
    let ours = Runtime::running().unwrap();
    ours.until_chained(true).unwrap();
    let mut rows = [
        ("without the plugin in the chain", Vec::new()),
        ("with it, a pod outside the mesh", Vec::new()),
        ("with it, an enrolled pod", Vec::new()),
    ];
    let (outside, inside) = (Spec::new("outside"), Spec::new("inside").ambient());
    for _ in 0..samples() {
        let times = [
            time_run(&bare, &outside, |_| {}),
            time_run(&ours, &outside, |id| {
                let known = ours.node.explain(&outside).unwrap();
                assert_eq!(known.state(), PodState::Out);
                assert_eq!(known.sandbox.unwrap().container_id, id);
            }),
            time_run(&ours, &inside, |id| {
                in_the_mesh(&ours, &ours.sandbox(inside.clone(), id).unwrap());
            }),
        ];
        for ((_, row), time) in rows.iter_mut().zip(times) {
            row.push(time);
        }
    }
    let mut out = io::stderr();
    let first = quantile(&rows.first().unwrap().1, 50);
    writeln!(out, "\n| RunPodSandbox | median ms | p99 | min | n | x first | more than first, ms |\n|---|---|---|---|---|---|---|").unwrap();
    for (what, times) in &rows {
        let [median, p99, min] = [50, 99, 0].map(|share| quantile(times, share));
        writeln!(
            out,
            "| {what} | {median:.1} | {p99:.1} | {min:.1} | {} | {:.3} | {:.1} |",
            times.len(),
            median / first,
            median - first
        )
        .unwrap();
    }
    ours.until_empty().unwrap();
}
