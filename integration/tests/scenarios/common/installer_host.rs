//! A host's directories and the installer on it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::{ffi::OsStringExt as _, fs::MetadataExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use integration::{TIMEOUT, bin, eventually, install_program};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

pub(crate) const PRIMARY: &str = "{ \"cniVersion\": \"1.0.0\", \"name\": \"k8s\",\r\n  \"plugins\": [\r\n    { \"type\": \"calico\", \"big\": 1e40, \"nodename\": \"\\u006e\" },\r\n    { \"type\": \"portmap\", \"snat\": true }\r\n  ]\r\n}\r\n";

/// The installer needs only VERSION of a plugin.
const PLUGIN: &str = "#!/bin/sh\necho '{\"supportedVersions\":[\"0.1.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}'\n";

pub(crate) struct Host {
    root: tempfile::TempDir,
    installer: Option<Child>,
}

/// A file's content or a link's target, mode, inode and change time.
pub(crate) type Tree = BTreeMap<PathBuf, (Vec<u8>, u32, u64, i64)>;

impl Host {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let script = tempfile::NamedTempFile::new().unwrap();
        fs::write(script.path(), PLUGIN).unwrap();
        let host = Self::bare(script.path());
        for dir in ["etc/cni/net.d", "opt/cni/bin"] {
            fs::create_dir_all(host.path(dir)).unwrap();
        }
        for (name, text) in files {
            host.put(name, text);
        }
        host
    }

    /// Creates a host without CNI directories, and with the plugin that the installer installs.
    pub(crate) fn bare(plugin: &Path) -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("image")).unwrap();
        install_program(plugin, &root.path().join("image/inpod-cni")).unwrap();
        Self {
            root,
            installer: None,
        }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    pub(crate) fn conf_dir(&self) -> PathBuf {
        self.path("etc/cni/net.d")
    }

    pub(crate) fn installed(&self) -> PathBuf {
        self.path("opt/cni/bin/inpod-cni")
    }

    /// Writes atomically, as well-behaved components do.
    pub(crate) fn put(&self, name: &str, text: &str) {
        put(&self.conf_dir(), name, text);
    }

    pub(crate) fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.conf_dir().join(name)).ok()
    }

    pub(crate) fn command(&self, settings: &[&str]) -> Command {
        let mut command = Command::new(bin("installer").unwrap());
        // Settings follow the optional subcommand.
        let (word, settings) = match settings.split_first() {
            Some((word, rest)) if !word.starts_with("--") => (Some(word), rest),
            _ => (None, settings),
        };
        command.args(word);
        let of_host = [
            ("host-root", ""),
            ("run-dir", "run"),
            ("plugin-source", "image/inpod-cni"),
            ("leave-file", "leave"),
            ("receipt-file", "receipt"),
        ];
        for (name, path) in of_host {
            command.arg(format!("--{name}={}", self.path(path).display()));
        }
        command.args([
            "--peer=uid",
            "--log-format=text",
            "--binary-grace-seconds=0",
        ]);
        command.args(settings).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, settings: &[&str]) -> Output {
        self.command(settings).output().unwrap()
    }

    pub(crate) fn start(&mut self, settings: &[&str]) {
        let command = self.command(settings);
        self.start_by(command);
    }

    /// Starts the installer, which ends with SIGKILL instead of making its nth of these system calls. strace is no parent
    /// of it.
    pub(crate) fn start_killed_at(&mut self, n: u32, calls: &str, settings: &[&str]) {
        let installer = self.command(settings);
        let mut command = Command::new("strace");
        command
            .args(["-D", "-f", "-qq", "-o", "/dev/null"])
            .arg(format!("--trace={calls}"))
            .arg(format!("--inject={calls}:signal=SIGKILL:when={n}"))
            .arg(installer.get_program())
            .args(installer.get_args())
            .stdin(Stdio::null());
        self.start_by(command);
    }

    /// Waits until the installer is ready, or was killed.
    pub(crate) fn is_killed(&mut self) -> bool {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let ended = self.installer.as_mut().unwrap().try_wait().unwrap();
            if let Some(status) = ended {
                assert_eq!(status.signal(), Some(9), "{}", self.log());
                self.installer = None;
                return true;
            }
            if self.is_ready() {
                return false;
            }
            assert!(Instant::now() < deadline, "{}", self.log());
        }
    }

    fn start_by(&mut self, mut command: Command) {
        assert!(self.installer.is_none());
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        self.installer = Some(
            command
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
                .unwrap(),
        );
    }

    pub(crate) fn start_ready(&mut self, settings: &[&str]) {
        self.start(settings);
        self.until_ready();
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.run(&["--check"]).status.success()
    }

    pub(crate) fn until_ready(&self) {
        let ready = eventually("the installer is ready", TIMEOUT, || {
            if self.is_ready() {
                Ok(())
            } else {
                Err("not ready")
            }
        });
        ready.unwrap_or_else(|error| panic!("{error}\n{}", self.log()));
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub(crate) fn until_logged(&self, part: &str) {
        eventually(part, TIMEOUT, || {
            let log = self.log();
            if log.contains(part) { Ok(()) } else { Err(log) }
        })
        .unwrap();
    }

    pub(crate) fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let patience = TIMEOUT + Duration::from_secs(20);
        let held = eventually(what, patience, || {
            if holds(self) {
                Ok(())
            } else {
                Err("it is not")
            }
        });
        held.unwrap_or_else(|error| {
            panic!(
                "{error}\n{:?}\n{}",
                self.tree("etc/cni/net.d").keys(),
                self.log()
            )
        });
    }

    /// Returns the exit code if there was one.
    pub(crate) fn stop(&mut self, signal: Signal) -> Option<i32> {
        let mut installer = self.installer.take().unwrap();
        kill(
            Pid::from_raw(i32::try_from(installer.id()).unwrap()),
            signal,
        )
        .unwrap();
        installer.wait().unwrap().code()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.installer
            .take_if(|installer| installer.try_wait().unwrap().is_some());
        self.installer.is_some()
    }

    pub(crate) fn ended(&mut self) -> Option<i32> {
        let mut installer = self.installer.take().unwrap();
        let status = eventually("the installer ends", TIMEOUT, || {
            installer.try_wait().unwrap().ok_or("it runs")
        });
        status
            .unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
            .code()
    }

    pub(crate) fn tree(&self, path: &str) -> Tree {
        let mut tree = Tree::new();
        gather(&self.path(path), &mut tree);
        tree
    }

    pub(crate) fn contents(&self, path: &str) -> BTreeMap<PathBuf, (Vec<u8>, u32)> {
        let tree = self.tree(path).into_iter();
        tree.map(|(path, (content, mode, ..))| (path, (content, mode)))
            .collect()
    }

    pub(crate) fn metric(&self, series: &str) -> Option<f64> {
        let socket = inpod_service::socket(&self.path("run"), "installer");
        let socket = socket.display().to_string();
        let text = integration::run(
            "curl",
            &["-sS", "--unix-socket", &socket, "http://localhost/metrics"],
        )
        .unwrap();
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.installer.is_some() {
            self.stop(Signal::SIGKILL);
        }
    }
}

/// Writes atomically through a name that no runtime loads.
pub(crate) fn put(dir: &Path, name: &str, text: &str) {
    let aside = dir.join(format!("{name}.tmp"));
    fs::write(&aside, text).unwrap();
    fs::rename(aside, dir.join(name)).unwrap();
}

fn gather(path: &Path, tree: &mut Tree) {
    let Ok(entries) = fs::read_dir(path) else {
        return;
    };
    for entry in entries {
        let entry = entry.unwrap();
        let found = entry.metadata().unwrap();
        if found.is_dir() {
            gather(&entry.path(), tree);
        } else {
            // An absolute link leads below the host's root, not to the file of this machine.
            let content = match fs::read_link(entry.path()) {
                Ok(target) => target.into_os_string().into_vec(),
                Err(_) => fs::read(entry.path()).unwrap_or_default(),
            };
            tree.insert(
                entry.path(),
                (content, found.mode(), found.ino(), found.mtime_nsec()),
            );
        }
    }
}
