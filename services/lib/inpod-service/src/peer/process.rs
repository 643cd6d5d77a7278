//! Reads files of a socket's process from procfs without confusing the process with another.

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

/// The process on the other end of a socket. With the kernel's pidfd of the peer (Linux 6.5), everything read is from
/// the process that connected. Older kernels leave a race, because the process may exit, and its pid may be reused,
/// between connect and read.
#[derive(Debug)]
pub struct Process {
    /// The pidfd, or `None` if the kernel has no pidfds of peers and none could be opened.
    pidfd: Option<OwnedFd>,
    credentials_pid: i32,
}

impl Process {
    /// Returns the process that connected or created the socket.
    ///
    /// # Errors
    ///
    /// Fails if the kernel does not report the process, or if the process has exited.
    pub fn of_peer(socket: impl AsFd) -> Result<Self, Refused> {
        let unseen = |error: nix::Error| Refused::Unseen(error.into());
        let credentials = getsockopt(&socket, sockopt::PeerCredentials).map_err(unseen)?;
        Self::new(pidfd_of(socket.as_fd()), credentials.pid())
    }

    /// Interprets the kernel's answer: ENOPROTOOPT before Linux 6.5, and for a reaped process EINVAL up to Linux 6.15
    /// and ESRCH later (`pidfd_prepare` in kernel/fork.c).
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

    /// Returns the pid of the process in this process's pid namespace.
    ///
    /// # Errors
    ///
    /// Fails if the process has exited, even before it is reaped, or if this process's pid namespace does not show it.
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

    /// Returns the pid and the content of a file in its procfs directory (`cgroup`, `status`).
    ///
    /// # Errors
    ///
    /// Fails like [`Self::pid`], or if the file is unreadable.
    pub fn read(&self, file: &str) -> Result<(i32, String), Refused> {
        let pid = self.pid()?;
        // The name of a cgroup may contain any bytes, not only UTF-8.
        let bytes = fs::read(format!("/proc/{pid}/{file}")).map_err(Refused::Unseen)?;
        // An unchanged pid proves that the file belonged to this process.
        if self.pid()? != pid {
            return Err(Refused::Invisible);
        }
        Ok((pid, String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// Opens a pidfd, which detects an exit of the process from here on. Returns `None` if a seccomp profile forbids
/// pidfd_open.
fn opened(pid: i32) -> Result<Option<OwnedFd>, Refused> {
    let pid = Pid::from_raw(pid).ok_or(Refused::Invisible)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(Errno::SRCH) => Err(Refused::Invisible),
        Err(Errno::PERM | Errno::NOSYS) => Ok(None),
        Err(error) => Err(Refused::Unseen(error.into())),
    }
}

/// Returns the pid (pidfd_open(2)), not positive if the process is invisible from here or has exited. Until reaped, an
/// exited process keeps its pid and procfs directory, but its pidfd is readable.
fn pid_of(pidfd: BorrowedFd<'_>) -> Result<i32, Refused> {
    let mut ends = [PollFd::new(pidfd, PollFlags::POLLIN)];
    let ended =
        poll(&mut ends, PollTimeout::ZERO).map_err(|error| Refused::Unseen(error.into()))?;
    if ended > 0 {
        return Ok(0);
    }
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
    let text = fs::read_to_string(path).map_err(Refused::Unseen)?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    Ok(pid
        .and_then(|pid| pid.trim().parse().ok())
        .unwrap_or_default())
}
