//! Many connections to ZDS at once and without end: ztunnel is served, and the broker stays small.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::common::ztunnel_pod::{Impostor, OTHER, Scene};
use anyhow::ensure;
use integration::{Spec, TIMEOUT, ZTUNNEL_CAPABILITIES, eventually};

/// The broker's limit (admission.rs).
const MAX_CHECKS_PER_SECOND: u64 = 500;

/// Limits a process's descriptors while it lives.
struct Descriptors {
    most: Arc<AtomicUsize>,
    end: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl Descriptors {
    fn watch(pid: u32) -> Self {
        let (most, end) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (seen, is_over) = (Arc::clone(&most), Arc::clone(&end));
        let watcher = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let now = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
                seen.fetch_max(now, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self {
            most,
            end,
            watcher: Some(watcher),
        }
    }

    fn most(mut self) -> usize {
        self.end.store(true, Ordering::Relaxed);
        self.watcher.take().unwrap().join().unwrap();
        self.most.load(Ordering::Relaxed)
    }
}

/// The clock ticks a hundred times a second on every Linux (`USER_HZ`).
fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks = |at: usize| fields.get(at).unwrap().parse::<u64>().unwrap();
    Duration::from_millis(10 * (ticks(11) + ticks(12)))
}

/// Returns how many connections a storm has made, which it says last.
fn made(storm: &Impostor) -> u64 {
    let said = storm.said();
    let last = said.lines().last().unwrap();
    last.split(' ').nth(2).unwrap().parse().unwrap()
}

/// Measures time until a new ztunnel has a complete snapshot.
fn served_after(scene: &Scene) -> Duration {
    let began = Instant::now();
    scene.start_ztunnel("ztunnel").unwrap();
    scene.node.ready().unwrap();
    began.elapsed()
}

fn named() -> Scene {
    let scene = Scene::new().unwrap();
    scene.write_ztunnel_manifest().unwrap();
    eventually("the broker is informed", TIMEOUT, || {
        let log = scene.node.tail("pod-events", 1000);
        ensure!(
            log.contains("Updated the list of ztunnel pods at the broker pods=1"),
            "{log}"
        );
        Ok(())
    })
    .unwrap();
    scene
}

#[test]
fn a_thousand_connections_at_once_cost_little_and_keep_no_ztunnel_waiting() {
    let scene = named();
    let broker = scene.node.pid("ztunnel-broker").unwrap();
    for within in [
        // In no pod, and in one that may become known.
        Vec::new(),
        scene
            .cgroups
            .container(OTHER, "", ZTUNNEL_CAPABILITIES)
            .unwrap(),
    ] {
        let at_rest = fs::read_dir(format!("/proc/{broker}/fd")).unwrap().count();
        let (memory, time) = (
            scene.node.resident("ztunnel-broker").unwrap(),
            cpu_time(broker),
        );
        let descriptors = Descriptors::watch(broker);
        let began = Instant::now();
        let mut storm = scene.impostor(&within, &["many", "1000"]).unwrap();
        let served = served_after(&scene);
        storm.ended().unwrap();
        let (took, most) = (began.elapsed(), descriptors.most());
        let grown = scene
            .node
            .resident("ztunnel-broker")
            .unwrap()
            .saturating_sub(memory);
        let computed = cpu_time(broker).saturating_sub(time);
        println!(
            "1,000 at once: ztunnel served after {served:?}, all sent away after {took:?}, descriptors {at_rest} -> {most}, \
             {grown} KiB more, {computed:?} of CPU"
        );
        assert_eq!(storm.said(), "connected\ngiven 0 descriptors\nend\n");
        assert!(most <= at_rest + 24, "{at_rest} -> {most}");
        assert!(grown < 4096, "{grown} KiB");
        scene
            .node
            .stop("ztunnel", nix::sys::signal::Signal::SIGTERM)
            .unwrap();
    }
    let lines = scene.refusals();
    assert!((2..=6).contains(&lines.len()), "{lines:?}");
}

#[test]
fn impostors_that_connect_for_ever_cost_little_and_keep_no_ztunnel_waiting() {
    const STORM: u64 = 6;
    let scene = named();
    let broker = scene.node.pid("ztunnel-broker").unwrap();
    let began = Instant::now();
    let descriptors = Descriptors::watch(broker);
    let seconds = STORM.to_string();
    let storm = || scene.impostor(&[], &["again", &seconds]).unwrap();
    let mut storms: Vec<_> = (0..4).map(|_| storm()).collect();
    let served = served_after(&scene);
    let pod = scene.node.pod(Spec::new("a").ambient()).unwrap();
    for storm in &mut storms {
        storm.ended().unwrap();
        assert!(
            storm.said().contains("given 0 descriptors"),
            "{}",
            storm.said()
        );
    }
    let (took, most) = (began.elapsed(), descriptors.most());
    let connections: Vec<u64> = storms.iter().map(made).collect();
    println!(
        "storm of {took:?}: {connections:?} connections, at most {most} descriptors, ztunnel served after {served:?}"
    );
    // Without a limit there are thousands each second.
    let limit = MAX_CHECKS_PER_SECOND * (took.as_secs() + 1);
    let sum = connections.iter().sum::<u64>();
    assert!(sum <= limit, "{sum} of {limit}");
    scene.node.until_whole(&pod.spec).unwrap();
    let lines = scene.refusals();
    assert!(lines.len() <= 12, "{} lines", lines.len());
    assert!(
        lines
            .iter()
            .any(|line| line.contains("is in no pod's container"))
    );
}
