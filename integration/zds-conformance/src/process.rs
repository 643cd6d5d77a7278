//! Runs the peer under test as a process.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{SigSet, Signal, killpg, raise},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};

use crate::netns::Netns;

/// The time between SIGTERM and SIGKILL for a process.
const GRACE: Duration = Duration::from_secs(2);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The process group of the running peer: a signal to the kit must not leave the group behind.
static RUNNING: Mutex<Option<Pid>> = Mutex::new(None);

fn running() -> MutexGuard<'static, Option<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes SIGINT and SIGTERM end the peer before this process; the call must precede the first thread.
pub fn end_with_us() -> io::Result<()> {
    let signals = ending_signals();
    signals.thread_block()?;
    thread::spawn(move || {
        let Ok(signal) = signals.wait() else { return };
        if let Some(group) = *running() {
            killpg(group, Signal::SIGKILL).unwrap_or_default();
        }
        signals.thread_unblock().unwrap_or_default();
        raise(signal).unwrap_or_default();
        // The background commands of a shell ignore SIGINT, so SIGKILL ends this run.
        raise(Signal::SIGKILL).unwrap_or_default();
    });
    Ok(())
}

fn ending_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM].into_iter().collect()
}

/// Unblocks SIGTERM during the start, because a child inherits the signal mask of the starting thread.
fn spawn_unblocked(command: &mut Command) -> io::Result<Child> {
    ending_signals().thread_unblock()?;
    let child = command.spawn();
    ending_signals().thread_block()?;
    child
}

/// A process with a group and a node netns of its own, killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
    _node: Netns,
}

#[derive(Debug)]
pub struct Start<'a> {
    /// The command line, in which `{socket}` and `{dir}` are replaced in each argument.
    pub command: &'a [String],
    pub socket: &'a Path,
    /// The environment variable for the path of the socket, if any.
    pub variable: Option<&'a str>,
    pub directory: &'a Path,
    /// The log file, to which the output of the peer is appended.
    pub log: &'a Path,
}

impl Start<'_> {
    pub fn spawn(&self) -> io::Result<Process> {
        let words: Vec<_> = self.command.iter().map(|word| self.fill(word)).collect();
        let Some((program, arguments)) = words.split_first() else {
            return Err(io::Error::other("no command"));
        };
        let log = File::options().append(true).create(true).open(self.log)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(self.variable.map(|name| (name, self.socket)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        let node = Netns::make()?;
        let name = program.to_string_lossy().into_owned();
        let named = move |error| io::Error::other(format!("cannot run {name}: {error}"));
        let child = node.run(move || spawn_unblocked(&mut command).map_err(named))?;
        let process = Process { child, _node: node };
        *running() = process.group();
        Ok(process)
    }

    fn fill(&self, word: &str) -> OsString {
        let word = word.replace("{socket}", &self.socket.to_string_lossy());
        word.replace("{dir}", &self.directory.to_string_lossy())
            .into()
    }
}

impl Process {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status if the process has ended. The process is reaped only on drop, because its group id must
    /// not be reused.
    pub fn ended(&self) -> Option<String> {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.group()?), look) {
            Ok(WaitStatus::Exited(_, code)) => Some(format!("exit code {code}")),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(format!("signal {signal}")),
            _ => None,
        }
    }

    pub fn await_end(&self, within: Duration) -> Option<String> {
        let end = Instant::now() + within;
        loop {
            let ended = self.ended();
            if ended.is_some() || Instant::now() >= end {
                return ended;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
        self.await_end(GRACE);
    }

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.pid()).ok().map(Pid::from_raw)
    }

    fn signal(&self, number: Signal) {
        if let Some(group) = self.group() {
            // The signal fails if the group is empty already.
            killpg(group, number).unwrap_or_default();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::SIGTERM);
            self.await_end(GRACE);
        }
        self.signal(Signal::SIGKILL);
        *running() = None;
        drop(self.child.wait());
    }
}

pub fn descriptors(pid: i32) -> io::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

pub fn netns_descriptors(pid: i32) -> io::Result<usize> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    Ok(links
        .filter(|link| link.to_string_lossy().starts_with("net:["))
        .count())
}
