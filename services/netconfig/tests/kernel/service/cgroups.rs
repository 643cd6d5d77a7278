//! Cgroups named like pods', in the cgroup2 hierarchy. Removed on drop.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use tempfile::TempDir;

/// A uniquely named cgroup, and those below it.
pub(crate) struct Cgroups {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    path: String,
    pid: u32,
    done: Sender<()>,
}

impl Cgroups {
    pub(crate) fn new(suffix: &str) -> Self {
        let root = format!("kubepods-test-{}-{suffix}", std::process::id());
        let (jobs, queue) = channel();
        let thread = std::thread::spawn(move || serve(&root, &queue));
        Self {
            jobs: Some(jobs),
            thread: Some(thread),
        }
    }

    /// Puts a process into a cgroup below this one.
    pub(crate) fn put(&self, pid: u32, path: &str) {
        let (done, answer) = channel();
        let path = path.to_owned();
        let job = Job { path, pid, done };
        self.jobs.as_ref().unwrap().send(job).unwrap();
        answer.recv().unwrap();
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Only this thread sees the mounted hierarchy.
fn serve(root: &str, queue: &Receiver<Job>) {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let directory = TempDir::new().unwrap();
    mount(
        none,
        directory.path(),
        Some("cgroup2"),
        MsFlags::empty(),
        none,
    )
    .unwrap();
    let root = directory.path().join(root);
    while let Ok(Job { path, pid, done }) = queue.recv() {
        let path = root.join(path);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("cgroup.procs"), pid.to_string()).unwrap();
        done.send(()).unwrap();
    }
    remove(&root);
    // A process that another thread starts has copies of open descriptors until it executes.
    umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
}

/// An ended process may still be counted: retries.
fn remove(root: &Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut below: Vec<PathBuf> = vec![root.to_owned()];
    let mut next = 0;
    while let Some(path) = below.get(next).cloned() {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let directories = entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir());
        below.extend(directories);
        next += 1;
    }
    for path in below.iter().rev() {
        while path.exists() && fs::remove_dir(path).is_err() {
            assert!(Instant::now() < deadline, "{} stays", path.display());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
