//! Many at once. A process of its own: it counts descriptors and looks at every thread. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

mod support;

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    thread,
    time::{Duration, Instant},
};

use netconfig::apply::Phase;

use support::{Fresh, ambient, plain, sandbox};

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The threads that are in another netns than this one. One may end while it is looked at.
fn strays() -> usize {
    let home = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let netns = tasks.filter_map(|task| fs::metadata(task.unwrap().path().join("ns/net")).ok());
    netns.filter(|netns| netns.ino() != home).count()
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

#[test]
fn a_hundred_applies_at_once_leave_no_thread_abroad_and_no_descriptor() {
    let mut pods: Vec<_> = (0..100).map(|_| Fresh::new()).collect();
    assert!(pods.iter().all(|pod| pod.nft("list ruleset").is_empty()));
    // Each pod's netns has a path by a thread of its own; those leave first.
    pods.iter_mut().for_each(Fresh::abandon);
    assert!(!pods.iter().any(|pod| pod.netns.path().exists()));
    let before = descriptors();
    thread::scope(|scope| {
        for chunk in pods.chunks(4) {
            scope.spawn(move || {
                for pod in chunk {
                    assert!(
                        plain()
                            .apply(&pod.netns, &ambient(), &sandbox("c1"))
                            .unwrap()
                            .changed
                    );
                    assert_eq!(
                        plain().verify(&pod.netns, &ambient()).unwrap().differences,
                        [""; 0]
                    );
                }
            });
        }
    });
    assert_eq!((strays(), descriptors()), (0, before));
    for pod in &pods {
        plain()
            .remove(&pod.netns, &sandbox("c1"), Phase::Final)
            .unwrap();
    }
    eventually("a thread is in a foreign netns", || strays() == 0);
    eventually("descriptors were left open", || descriptors() == before);
}
