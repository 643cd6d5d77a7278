//! The helper that starts a program of iptables: netconfig's own binary, called with [`MODE`]. It ties its lifetime
//! to netconfig's, waits until a previous program has ended, hides the name service and executes the program.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::{self, File},
    io::{self, Write as _},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Pid, execv, getppid},
};

use super::lock::acquire_lock;

/// Makes netconfig run as this helper.
const MODE: &str = "run-program";

/// On its own messages on standard error.
pub(super) const LOG_PREFIX: &str = "run-program: ";

/// The previous program did not release its lock in time. No program of iptables uses this code.
pub(super) const EXIT_LOCKED: i32 = 120;

pub(super) const EXIT_NOT_STARTED: i32 = 121;

/// `xt_owner` looks users up here, possibly over the network and through the pod's own DNS servers. inpod's rules
/// contain no names to resolve.
const NAME_SERVICE: &str = "/etc/nsswitch.conf";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Invocation {
    /// The program must not outlive it.
    pub(super) parent: u32,
    /// For the previous program to end.
    pub(super) timeout: Duration,
    /// Locked while the program runs.
    pub(super) lock: Option<PathBuf>,
    /// Absolute path, followed by the arguments.
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

impl Invocation {
    /// Encodes it as arguments of netconfig.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let lock = self.lock.as_deref().unwrap_or_else(|| Path::new(""));
        let mut arguments: Vec<OsString> = vec![
            MODE.into(),
            self.parent.to_string().into(),
            self.timeout.as_millis().to_string().into(),
            lock.into(),
            self.program.clone().into(),
        ];
        arguments.extend(self.arguments.iter().map(OsString::from));
        arguments
    }

    /// Returns `None` unless produced by [`Self::arguments`].
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
        let (parent, timeout) = (number()?, number()?);
        let lock = arguments.next().filter(|lock| !lock.is_empty());
        Some(Self {
            parent: parent.try_into().ok()?,
            timeout: Duration::from_millis(timeout),
            lock: lock.map(PathBuf::from),
            program: arguments.next()?.into(),
            arguments: arguments
                .map(|argument| argument.into_string().ok())
                .collect::<Option<_>>()?,
        })
    }
}

/// Executes a program of iptables if the command line asks for it; returns an exit code if that failed, `None` for
/// other command lines. Must come first in `main`, while the process has one thread.
pub fn run_program(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if arguments.nth(1).as_deref() != Some(OsStr::new(MODE)) {
        return None;
    }
    let (code, error) = match Invocation::parse(arguments) {
        Some(invocation) => exec_program(&invocation),
        None => (
            EXIT_NOT_STARTED,
            io::Error::other("only netconfig may run this command"),
        ),
    };
    log(&error.to_string());
    Some(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn exec_program(invocation: &Invocation) -> (i32, io::Error) {
    if let Err(error) = die_with_parent(invocation.parent) {
        return (EXIT_NOT_STARTED, error);
    }
    // Nothing closes it until the program ends.
    let lock = match invocation
        .lock
        .as_deref()
        .map(|path| acquire(path, invocation.timeout))
    {
        Some(Err(error)) => return (EXIT_LOCKED, error),
        Some(Ok(lock)) => Some(lock),
        None => None,
    };
    if let Err(error) = hide_name_service() {
        log(&format!("cannot hide {NAME_SERVICE}: {error}"));
    }
    let error = exec(invocation);
    drop(lock);
    (EXIT_NOT_STARTED, error)
}

/// Executes without a shell, which std would try for files that the kernel cannot execute. The environment contains
/// only what is needed.
fn exec(invocation: &Invocation) -> io::Error {
    let arguments = [invocation.program.as_os_str()].into_iter();
    let arguments = arguments.chain(invocation.arguments.iter().map(OsStr::new));
    let arguments: Result<Vec<_>, _> = arguments
        .map(|word| CString::new(word.as_bytes()))
        .collect();
    match arguments.as_deref() {
        Ok(arguments @ [program, ..]) => match execv(program, arguments) {
            Err(errno) => errno.into(),
        },
        Ok([]) | Err(_) => io::ErrorKind::InvalidInput.into(),
    }
}

/// Has the kernel kill this process when the thread that started it ends. The check is for an earlier end.
fn die_with_parent(parent: u32) -> io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    if i32::try_from(parent).map(Pid::from_raw) == Ok(getppid()) {
        Ok(())
    } else {
        Err(io::Error::other("netconfig has ended"))
    }
}

fn acquire(path: &Path, timeout: Duration) -> io::Result<File> {
    let lock = acquire_lock(path, Instant::now() + timeout)?;
    fcntl(&lock, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(lock)
}

/// Uses an own mount namespace: no other process sees the change.
fn hide_name_service() -> io::Result<()> {
    if !fs::exists(NAME_SERVICE)? {
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    let nothing = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(nothing, "/", nothing, private, nothing)?;
    let bind = MsFlags::MS_BIND;
    mount(Some("/dev/null"), NAME_SERVICE, nothing, bind, nothing)?;
    Ok(())
}

fn log(what: &str) {
    let line = format!("{LOG_PREFIX}{what}\n");
    // A failure cannot be reported anywhere.
    io::stderr().write_all(line.as_bytes()).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_way_through_a_command_line() {
        let invocation = Invocation {
            parent: 7,
            timeout: Duration::from_millis(1500),
            lock: Some("/run/a.lock".into()),
            program: "/usr/sbin/iptables-nft-save".into(),
            arguments: vec!["--noflush".into(), "-w".into()],
        };
        let mut arguments = invocation.arguments().into_iter();
        assert_eq!(arguments.next().unwrap(), MODE);
        assert_eq!(Invocation::parse(arguments), Some(invocation.clone()));
        let invocation = Invocation {
            lock: None,
            ..invocation
        };
        assert_eq!(
            Invocation::parse(invocation.arguments().into_iter().skip(1)),
            Some(invocation)
        );
    }

    #[test]
    fn another_command_line_is_none_of_its_business() {
        let arguments =
            |arguments: &[&str]| arguments.iter().map(OsString::from).collect::<Vec<_>>();
        for line in [&["netconfig"][..], &["netconfig", "--run-dir", MODE]] {
            assert_eq!(run_program(arguments(line).into_iter()), None);
        }
        let incomplete = ["netconfig", MODE, "1"];
        assert!(run_program(arguments(&incomplete).into_iter()).is_some());
    }
}
