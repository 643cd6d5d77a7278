//! netconfig as its own helper: the process that a program of iptables is started through. It says what becomes of it
//! when netconfig is killed, waits for its predecessor, hides what the program has no business with, and becomes it.

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

use super::lock::wait_for;

/// What netconfig is called with to be this.
const MODE: &str = "run-program";

/// What each line of its own on standard error begins with.
pub(super) const REMARK: &str = "run-program: ";

/// It ended because the predecessor's lock did not come free. No program of iptables ends so.
pub(super) const LOCKED: i32 = 120;

/// It ended because the program could not be started.
pub(super) const NOT_STARTED: i32 = 121;

/// Where names are looked up that no rule of ours has (`xt_owner` asks for users): possibly over the network, by
/// the pod's own name servers.
const NAME_SERVICE: &str = "/etc/nsswitch.conf";

/// What is to be run, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// The process that it must not outlive.
    pub(super) parent: u32,
    /// How long the predecessor may take to be gone.
    pub(super) patience: Duration,
    /// What it holds as long as it lives, if anything.
    pub(super) lock: Option<PathBuf>,
    /// The program, by its absolute path, and its arguments.
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

impl Order {
    /// As arguments of netconfig.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let lock = self.lock.as_deref().unwrap_or_else(|| Path::new(""));
        let mut arguments: Vec<OsString> = vec![
            MODE.into(),
            self.parent.to_string().into(),
            self.patience.as_millis().to_string().into(),
            lock.into(),
            self.program.clone().into(),
        ];
        arguments.extend(self.arguments.iter().map(OsString::from));
        arguments
    }

    /// Without the mode. `None` for what [`Self::arguments`] never gives.
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
        let (parent, patience) = (number()?, number()?);
        let lock = arguments.next().filter(|lock| !lock.is_empty());
        Some(Self {
            parent: parent.try_into().ok()?,
            patience: Duration::from_millis(patience),
            lock: lock.map(PathBuf::from),
            program: arguments.next()?.into(),
            arguments: arguments
                .map(|argument| argument.into_string().ok())
                .collect::<Option<_>>()?,
        })
    }
}

/// Becomes a program of iptables if that is what the command line asks for; gives an exit code where that failed, and
/// nothing where the command line asks for something else. To be called first of all, while there is one thread.
pub fn run_program(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if arguments.nth(1).as_deref() != Some(OsStr::new(MODE)) {
        return None;
    }
    let (code, error) = match Order::parse(arguments) {
        Some(order) => become_program(&order),
        None => (NOT_STARTED, io::Error::other("netconfig alone calls this")),
    };
    remark(&error.to_string());
    Some(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns only where it failed.
fn become_program(order: &Order) -> (i32, io::Error) {
    if let Err(error) = live_no_longer_than(order.parent) {
        return (NOT_STARTED, error);
    }
    // Open until the program ends: nobody closes it.
    let lock = match order.lock.as_deref().map(|path| hold(path, order.patience)) {
        Some(Err(error)) => return (LOCKED, error),
        Some(Ok(lock)) => Some(lock),
        None => None,
    };
    if let Err(error) = hide_name_service() {
        remark(&format!("cannot hide {NAME_SERVICE}: {error}"));
    }
    let error = execute(order);
    drop(lock);
    (NOT_STARTED, error)
}

/// Without a shell, which std would try where the file is none that the kernel knows. The environment is what this
/// process was given: nothing but what is needed.
fn execute(order: &Order) -> io::Error {
    let words = [order.program.as_os_str()].into_iter();
    let words = words.chain(order.arguments.iter().map(OsStr::new));
    let words: Result<Vec<_>, _> = words.map(|word| CString::new(word.as_bytes())).collect();
    match words.as_deref() {
        Ok(words @ [program, ..]) => match execv(program, words) {
            Err(errno) => errno.into(),
        },
        Ok([]) | Err(_) => io::ErrorKind::InvalidInput.into(),
    }
}

/// The kernel kills this process when the thread that started it ends. It may have ended before that was said.
fn live_no_longer_than(parent: u32) -> io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    if i32::try_from(parent).map(Pid::from_raw) == Ok(getppid()) {
        Ok(())
    } else {
        Err(io::Error::other("netconfig has ended"))
    }
}

fn hold(path: &Path, patience: Duration) -> io::Result<File> {
    let lock = wait_for(path, Instant::now() + patience)?;
    fcntl(&lock, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(lock)
}

/// In a mount namespace of its own, of which nobody else sees anything.
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

fn remark(what: &str) {
    let line = format!("{REMARK}{what}\n");
    // Nobody is left to tell when this fails.
    io::stderr().write_all(line.as_bytes()).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_way_through_a_command_line() {
        let order = Order {
            parent: 7,
            patience: Duration::from_millis(1500),
            lock: Some("/run/a.lock".into()),
            program: "/usr/sbin/iptables-nft-save".into(),
            arguments: vec!["--noflush".into(), "-w".into()],
        };
        let mut arguments = order.arguments().into_iter();
        assert_eq!(arguments.next().unwrap(), MODE);
        assert_eq!(Order::parse(arguments), Some(order.clone()));
        let order = Order {
            lock: None,
            ..order
        };
        assert_eq!(
            Order::parse(order.arguments().into_iter().skip(1)),
            Some(order)
        );
    }

    #[test]
    fn another_command_line_is_none_of_its_business() {
        let arguments = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for words in [&["netconfig"][..], &["netconfig", "--run-dir", MODE]] {
            assert_eq!(run_program(arguments(words).into_iter()), None);
        }
        let incomplete = ["netconfig", MODE, "1"];
        assert!(run_program(arguments(&incomplete).into_iter()).is_some());
    }
}
