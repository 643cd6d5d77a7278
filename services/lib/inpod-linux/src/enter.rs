use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use nix::sched::CloneFlags;

use crate::EnterError;

/// The netns of the thread that opens this path.
pub(crate) const CURRENT: &str = "/proc/thread-self/ns/net";

/// The number of visits to another netns since the process started.
static VISITS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn visits() -> u64 {
    VISITS.load(Ordering::Relaxed)
}

/// Returns the thread to its own netns on drop, even after a panic.
struct ReturnGuard(File);

impl Drop for ReturnGuard {
    fn drop(&mut self) {
        if let Err(errno) = setns(self.0.as_fd()) {
            // The log may be a task on this very thread, so the error goes to standard error.
            let line = format!("cannot leave a foreign netns: {errno}; aborting\n");
            io::stderr().write_all(line.as_bytes()).unwrap_or_default();
            std::process::abort();
        }
    }
}

/// Implements [`Netns::within`](crate::Netns::within) for a file descriptor.
pub(crate) fn within<T>(netns: BorrowedFd<'_>, f: impl FnOnce() -> T) -> Result<T, EnterError> {
    // The path is opened on each call, because the thread must return to its own netns, not to the process's.
    let home = File::open(CURRENT).map_err(EnterError::Home)?;
    VISITS.fetch_add(1, Ordering::Relaxed);
    setns(netns).map_err(EnterError::Setns)?;
    // The guard is created after entering: a thread without the right to enter has nothing to return from, and no right
    // to return.
    let guard = ReturnGuard(home);
    let result = f();
    drop(guard);
    Ok(result)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the only call of setns; `within` returns from it"
)]
fn setns(netns: BorrowedFd<'_>) -> Result<(), nix::Error> {
    nix::sched::setns(netns, CloneFlags::CLONE_NEWNET)
}
