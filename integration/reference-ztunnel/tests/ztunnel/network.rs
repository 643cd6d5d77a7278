//! Creates network namespaces, and runs code in them.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A network namespace, which lives as long as a descriptor is open.
pub(crate) struct Netns(pub(crate) File);

impl Netns {
    pub(crate) fn new() -> Self {
        let made = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect(
                "needs root: unshare --user --map-root-user --net cargo test -p reference-ztunnel",
            );
            File::open("/proc/thread-self/ns/net").expect("/proc")
        });
        let netns = Self(made.join().expect("a netns"));
        netns.ip("link set lo up");
        netns
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "called on a thread that ends with the closure"
    )]
    pub(crate) fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                nix::sched::setns(&self.0, CloneFlags::CLONE_NEWNET).expect("setns");
                f()
            });
            inside.join().expect("the closure")
        })
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    pub(crate) fn ip(&self, arguments: &str) {
        self.run("ip", arguments.split(' '), "");
    }

    pub(crate) fn nft(&self, rules: &str) {
        self.run("nft", ["-f", "-"].into_iter(), rules);
    }

    fn run<'a>(&self, program: &str, arguments: impl Iterator<Item = &'a str>, input: &str) {
        use std::io::Write;

        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped());
        // A child starts in the netns of the thread that spawns it.
        let mut child = self.within(|| command.spawn()).expect("iproute2 and nft");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).expect("write");
        drop(stdin);
        let status = child.wait().expect("wait");
        assert!(status.success(), "{command:?}: {status}");
    }

    /// Returns the listening TCP ports, with one entry per listener.
    pub(crate) fn listening(&self) -> Vec<u16> {
        let read = |name| move || fs::read_to_string(name).expect("/proc/thread-self/net");
        let v4 = self.within(read("/proc/thread-self/net/tcp"));
        let v6 = self.within(read("/proc/thread-self/net/tcp6"));
        let mut ports: Vec<_> = v4.lines().chain(v6.lines()).filter_map(listener).collect();
        ports.sort_unstable();
        ports
    }

    pub(crate) fn awaits_listening(&self, ports: &[u16]) {
        let expected = || (self.listening() == ports).then_some(());
        eventually("the listeners", expected);
    }
}

fn listener(line: &str) -> Option<u16> {
    let mut fields = line.split_whitespace();
    let (local, state) = (fields.nth(1)?, fields.nth(1)?);
    let port = local.rsplit(':').next()?;
    (state == "0A").then(|| u16::from_str_radix(port, 16).expect("a port"))
}

pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}: not within {DEADLINE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
