//! Many netns at once, in a separate process: descriptors are counted and all threads scanned. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

#[path = "kernel/support.rs"]
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
    rules::{Ambient, Ipv6, Redirection},
};

use support::{Fresh, plain, sandbox};

const PODS: usize = 200;
const CALLERS: usize = 32;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns threads in other netns. A thread may end during the scan.
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

/// Only descriptors keep these netns alive: the threads that made them have ended.
fn pods(count: usize) -> Vec<Fresh> {
    let mut pods: Vec<_> = (0..count).map(|_| Fresh::new()).collect();
    assert!(pods.iter().all(|pod| pod.nft("list ruleset").is_empty()));
    pods.iter_mut().for_each(Fresh::abandon);
    assert!(!pods.iter().any(|pod| pod.netns.path().exists()));
    pods
}

/// The next free caller gets the next item.
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

/// Different redirections reveal a mix-up.
#[test]
fn many_callers_lose_no_update_and_leave_no_thread_abroad_and_no_descriptor() {
    let pods = pods(PODS);
    let before = descriptors();
    let of = |number: usize| {
        Redirection::Ambient(Ambient {
            dns_capture: number.is_multiple_of(2),
            keep_existing_connections: number.is_multiple_of(3),
            ipv6: if number.is_multiple_of(5) {
                Ipv6::Off
            } else {
                Ipv6::Auto
            },
            ..Ambient::default()
        })
    };
    let is_done = AtomicBool::new(false);
    let abroad = thread::scope(|scope| {
        let most = scope.spawn(|| most_strays(&is_done));
        storm(pods.iter().enumerate(), |(number, pod)| {
            // The second time, rules have to be replaced.
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

/// Returns most threads at once in other netns, without the scanning one.
fn most_strays(is_done: &AtomicBool) -> usize {
    let mut most = 0;
    while !is_done.load(Ordering::Relaxed) {
        most = most.max(strays());
    }
    most
}
