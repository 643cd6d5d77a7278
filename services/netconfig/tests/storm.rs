//! Many netns at once. A process of its own, since it counts descriptors and scans all threads. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

mod support;

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use netconfig::{
    apply::Phase,
    rules::{Redirection, scenarios},
};

use support::{Fresh, plain, sandbox};

/// Number of pods, and of concurrent callers.
const PODS: usize = 200;
const CALLERS: usize = 32;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Counts the threads that are in another netns. A thread may end during the scan.
fn strays() -> usize {
    let home = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let netns = tasks.filter_map(|task| fs::metadata(task.unwrap().path().join("ns/net")).ok());
    netns.filter(|netns| netns.ino() != home).count()
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

/// Creates netns that only their descriptors keep alive: the threads that made them have ended.
fn pods(count: usize) -> Vec<Fresh> {
    let mut pods: Vec<_> = (0..count).map(|_| Fresh::new()).collect();
    assert!(pods.iter().all(|pod| pod.nft("list ruleset").is_empty()));
    pods.iter_mut().for_each(Fresh::abandon);
    assert!(!pods.iter().any(|pod| pod.netns.path().exists()));
    pods
}

/// Gives each item to the next free caller.
fn storm<T: Send>(items: impl Iterator<Item = T> + Send, call: impl Fn(T) + Sync) {
    let items = Mutex::new(items);
    thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                loop {
                    let next = items.lock().unwrap().next();
                    let Some(item) = next else { return };
                    call(item);
                }
            });
        }
    });
}

/// Each has a redirection of its own, so that a mix-up would show.
#[test]
fn many_callers_lose_no_update_and_leave_no_thread_abroad_and_no_descriptor() {
    let pods = pods(PODS);
    let (before, scenarios) = (descriptors(), scenarios::all().collect::<Vec<_>>());
    let of = |number: usize| Redirection::Ambient(scenarios[number % scenarios.len()].1.clone());
    let is_done = AtomicBool::new(false);
    let abroad = thread::scope(|scope| {
        let most = scope.spawn(|| most_strays(&is_done));
        storm(pods.iter().enumerate(), |(number, pod)| {
            // Applies twice, so that the second time rules have to be replaced.
            for number in [number + 1, number] {
                let applied = plain().apply(&pod.netns, &of(number), &sandbox("c1"));
                assert!(applied.unwrap().changed);
            }
        });
        is_done.store(true, Ordering::Relaxed);
        most.join().unwrap()
    });
    assert!(abroad > 0, "nobody was seen to enter a netns");
    eventually("a thread is in a foreign netns", || strays() == 0);
    eventually("descriptors were left open", || descriptors() == before);
    for (number, pod) in pods.iter().enumerate() {
        let verified = plain().verify(&pod.netns, &of(number)).unwrap();
        assert_eq!(verified.differences, [""; 0], "{number}");
    }
    storm(pods.iter(), |pod| {
        plain()
            .remove(&pod.netns, &sandbox("c1"), Phase::Final)
            .unwrap();
    });
    for pod in &pods {
        assert_eq!(plain().observe(&pod.netns).unwrap().tag, None);
    }
    eventually("a thread is in a foreign netns", || strays() == 0);
    eventually("descriptors were left open", || descriptors() == before);
    drop(pods);
    eventually("descriptors of the netns were left open", || {
        descriptors() + PODS == before
    });
}

/// Returns the greatest number of threads that were in other netns at once. The scanning thread is not in one.
fn most_strays(is_done: &AtomicBool) -> usize {
    let mut most = 0;
    while !is_done.load(Ordering::Relaxed) {
        most = most.max(strays());
    }
    most
}
