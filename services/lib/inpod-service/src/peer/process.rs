//! The process that connected a socket, looked at in procfs without mistaking another one for it.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt},
};

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::{Refused, pidfd_of};

/// The process on the other end of a connected socket. Through a pidfd of the kernel's (Linux 6.5) what is read is known
/// to be of the process that connected; before, one that ends and whose pid is reused between connecting and the look
/// could be mistaken.
#[derive(Debug)]
pub struct Process {
    /// `None` where neither the kernel tells pidfds of peers nor one may be opened.
    pidfd: Option<OwnedFd>,
    credentials_pid: i32,
}

impl Process {
    /// The process that connected that socket, or made it.
    ///
    /// # Errors
    ///
    /// When the kernel does not say who it is, or it has ended.
    pub fn of_peer(socket: impl AsFd) -> Result<Self, Refused> {
        let unseen = |error: nix::Error| Refused::Unseen(error.into());
        let credentials = getsockopt(&socket, sockopt::PeerCredentials).map_err(unseen)?;
        Self::new(pidfd_of(socket.as_fd()), credentials.pid())
    }

    /// Of what the kernel said of its pidfd: ENOPROTOOPT before Linux 6.5. A process that has ended and was waited
    /// for is EINVAL from there to Linux 6.15, ESRCH afterwards (`pidfd_prepare` in kernel/fork.c).
    pub(super) fn new(pidfd: nix::Result<OwnedFd>, credentials_pid: i32) -> Result<Self, Refused> {
        let pidfd = match pidfd {
            Ok(pidfd) => Some(pidfd),
            Err(nix::Error::ENOPROTOOPT) => opened(credentials_pid)?,
            Err(nix::Error::EINVAL | nix::Error::ESRCH) => return Err(Refused::Invisible),
            Err(error) => return Err(Refused::Unseen(error.into())),
        };
        Ok(Self {
            pidfd,
            credentials_pid,
        })
    }

    /// Its pid as this process sees it.
    ///
    /// # Errors
    ///
    /// When it has ended, waited for or not, or is in a pid namespace that this process does not see.
    pub fn pid(&self) -> Result<i32, Refused> {
        let pid = match &self.pidfd {
            Some(pidfd) => pid_of(pidfd.as_fd())?,
            None => self.credentials_pid,
        };
        if pid <= 0 {
            return Err(Refused::Invisible);
        }
        Ok(pid)
    }

    /// Its pid, and what a file of its directory in procfs says (`cgroup`, `status`).
    ///
    /// # Errors
    ///
    /// As [`Self::pid`], and when the file cannot be read.
    pub fn read(&self, file: &str) -> Result<(i32, String), Refused> {
        let pid = self.pid()?;
        // A cgroup's name may be any bytes.
        let bytes = fs::read(format!("/proc/{pid}/{file}")).map_err(Refused::Unseen)?;
        // Still the same process after the look: then the look was at it.
        if self.pid()? != pid {
            return Err(Refused::Invisible);
        }
        Ok((pid, String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// A pidfd of whoever has a pid now: that it ends is seen from here on. `None` where a seccomp profile keeps from opening
/// one.
fn opened(pid: i32) -> Result<Option<OwnedFd>, Refused> {
    let pid = Pid::from_raw(pid).ok_or(Refused::Invisible)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(Errno::SRCH) => Err(Refused::Invisible),
        Err(Errno::PERM | Errno::NOSYS) => Ok(None),
        Err(error) => Err(Refused::Unseen(error.into())),
    }
}

/// The pid behind a pidfd (pidfd_open(2)): 0 when it is not visible from here, -1 when it has ended. One that has ended
/// and was not waited for still has its pid and its place in procfs; its pidfd is readable.
fn pid_of(pidfd: BorrowedFd<'_>) -> Result<i32, Refused> {
    let mut ends = [PollFd::new(pidfd, PollFlags::POLLIN)];
    let ended =
        poll(&mut ends, PollTimeout::ZERO).map_err(|error| Refused::Unseen(error.into()))?;
    if ended > 0 {
        return Ok(-1);
    }
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
    let text = fs::read_to_string(path).map_err(Refused::Unseen)?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    Ok(pid.and_then(|pid| pid.trim().parse().ok()).unwrap_or(-1))
}
