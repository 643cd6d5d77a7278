use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, BorrowedFd},
};

use nix::sched::CloneFlags;

use crate::EnterError;

/// The netns of whichever thread opens it.
pub(crate) const CURRENT: &str = "/proc/thread-self/ns/net";

/// Brings the thread home when it goes out of scope, by return or by panic.
struct WayHome(File);

impl Drop for WayHome {
    fn drop(&mut self) {
        if let Err(errno) = setns(self.0.as_fd()) {
            // The log may be a task on this very thread. Nobody is left to tell when this fails too.
            let line = format!("cannot leave a foreign netns: {errno}; aborting\n");
            io::stderr().write_all(line.as_bytes()).unwrap_or_default();
            std::process::abort();
        }
    }
}

/// See `Netns::within`.
pub(crate) fn within<T>(netns: BorrowedFd<'_>, f: impl FnOnce() -> T) -> Result<T, EnterError> {
    // Opened each time: the thread's netns, not the process's, is where it must go back to.
    let home = File::open(CURRENT).map_err(EnterError::Home)?;
    setns(netns).map_err(EnterError::Setns)?;
    // From here on only: who may not enter may not come back either, and has nowhere to come back from.
    let way_home = WayHome(home);
    let result = f();
    drop(way_home);
    Ok(result)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one door: in and out by `within`"
)]
fn setns(netns: BorrowedFd<'_>) -> Result<(), nix::Error> {
    nix::sched::setns(netns, CloneFlags::CLONE_NEWNET)
}
