//! A test's netns, whose creating thread stays in it.

use std::{
    os::fd::AsFd,
    path::PathBuf,
    process::Command,
    sync::mpsc::{Receiver, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use inpod_types::SandboxRef;
use netconfig::{
    apply::Writer,
    rules::{Ambient, Redirection},
};
use nix::sched::{CloneFlags, unshare};
use socket2::SockRef;

/// `lo` is up. The path is valid while this lives.
pub(crate) struct Fresh {
    pub(crate) netns: Netns,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Fresh {
    pub(crate) fn new() -> Self {
        let fresh = Self::down();
        fresh.ip("link set lo up");
        fresh
    }

    /// The kernel's default for `lo`.
    pub(crate) fn down() -> Self {
        Self::by(|| unshare(CloneFlags::CLONE_NEWNET).unwrap())
    }

    /// `enter` moves the thread into its netns.
    pub(crate) fn by(enter: impl FnOnce() + Send + 'static) -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "the kernel tests make network namespaces: run them as root"
        );
        let (jobs, queue) = channel();
        let (opened, netns) = channel();
        let thread = std::thread::spawn(move || {
            enter();
            live_here(&opened, &queue);
        });
        let netns: Netns = netns.recv().unwrap();
        Self {
            netns,
            jobs: Some(jobs),
            thread: Some(thread),
        }
    }

    pub(crate) fn run<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = channel();
        let job = Box::new(move || done.send(f()).unwrap());
        self.jobs.as_ref().unwrap().send(job).unwrap();
        result.recv().unwrap()
    }

    pub(crate) fn command(&self, program: &'static str, arguments: &[&str]) -> String {
        let arguments: Vec<_> = arguments.iter().map(|&text| text.to_owned()).collect();
        let mut command = Command::new(program);
        command.args(&arguments);
        let output = self.run(move || command.output()).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn ip(&self, arguments: &str) -> String {
        let arguments: Vec<_> = arguments.split(' ').collect();
        self.command("ip", &arguments)
    }

    pub(crate) fn nft(&self, script: &str) -> String {
        self.command("nft", &[script])
    }

    /// The path becomes invalid, the netns stays.
    pub(crate) fn abandon(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
            // The kernel wakes the waiting thread before the ended one leaves its netns.
            let deadline = Instant::now() + Duration::from_secs(20);
            while self.netns.path_intact() {
                assert!(
                    Instant::now() < deadline,
                    "the path of an ended thread stays"
                );
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        self.abandon();
    }
}

fn live_here(opened: &Sender<Netns>, queue: &Receiver<Job>) {
    let task = std::fs::read_link("/proc/thread-self").unwrap();
    let path = PathBuf::from("/proc").join(task).join("ns/net");
    let netns = Netns::open(&path, &roots()).unwrap();
    let machines = ["/proc/1/ns/net", "/proc/self/ns/net"];
    // Process 1's netns may not be readable; this process's is.
    let is_machines = |path: &str| netns.is_at(path.as_ref()).unwrap_or(false);
    assert!(
        !machines.into_iter().any(is_machines),
        "the machine's own netns must never be under test"
    );
    opened.send(netns).unwrap();
    while let Ok(job) = queue.recv() {
        job();
    }
}

/// The mark of ztunnel's sockets, without which a listener on ztunnel's ports gets nothing.
pub(crate) fn mark_as_ztunnel(socket: &impl AsFd) {
    SockRef::from(socket).set_mark(0x539).unwrap();
}

pub(crate) fn roots() -> Vec<PathBuf> {
    vec!["/proc".into(), "/run/netns".into()]
}

pub(crate) fn sandbox(container_id: &str) -> SandboxRef {
    SandboxRef {
        network_name: "net".parse().unwrap(),
        container_id: container_id.parse().unwrap(),
        ifname: "eth0".parse().unwrap(),
    }
}

pub(crate) fn plain() -> Writer {
    Writer::default()
}

pub(crate) fn ambient() -> Redirection {
    Redirection::Ambient(Ambient::default())
}

/// Some tests include this module but write no rules.
const _: fn() -> Writer = plain;
const _: fn() -> Redirection = ambient;
