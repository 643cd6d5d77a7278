//! Reads a socket's process from procfs without confusing it with another.

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

/// The process on the other end of a socket. With the kernel's pidfd of the peer (Linux 6.5) everything read
/// is of the process that connected. Older kernels leave a race: the process may exit and its pid be reused
/// between connect and read.
#[derive(Debug)]
pub struct Process {
    /// `None` without kernel support, if none could be opened.
    pidfd: Option<OwnedFd>,
    credentials_pid: i32,
}

impl Process {
    /// Returns the process that connected or created the socket.
    ///
    /// # Errors
    ///
    /// If the kernel does not report it, or it has exited.
    pub fn of_peer(socket: impl AsFd) -> Result<Self, Refused> {
        let unseen = |error: nix::Error| Refused::Unseen(error.into());
        let credentials = getsockopt(&socket, sockopt::PeerCredentials).map_err(unseen)?;
        Self::new(pidfd_of(socket.as_fd()), credentials.pid())
    }

    /// Interprets the kernel's answer: ENOPROTOOPT before Linux 6.5. A reaped process is EINVAL up to Linux 6.15 and
    /// ESRCH after it (`pidfd_prepare` in kernel/fork.c).
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

    /// Returns the pid that this process sees.
    ///
    /// # Errors
    ///
    /// If the process has exited, reaped or not, or is in an invisible pid namespace.
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

    /// Returns the pid and a file of its procfs directory (`cgroup`, `status`).
    ///
    /// # Errors
    ///
    /// Like [`Self::pid`], or if the file is unreadable.
    pub fn read(&self, file: &str) -> Result<(i32, String), Refused> {
        let pid = self.pid()?;
        // A cgroup's name may contain any bytes.
        let bytes = fs::read(format!("/proc/{pid}/{file}")).map_err(Refused::Unseen)?;
        // Proves that the file was of this process.
        if self.pid()? != pid {
            return Err(Refused::Invisible);
        }
        Ok((pid, String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// Detects the process's exit from here on. `None` if a seccomp profile forbids pidfd_open.
fn opened(pid: i32) -> Result<Option<OwnedFd>, Refused> {
    let pid = Pid::from_raw(pid).ok_or(Refused::Invisible)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(Errno::SRCH) => Err(Refused::Invisible),
        Err(Errno::PERM | Errno::NOSYS) => Ok(None),
        Err(error) => Err(Refused::Unseen(error.into())),
    }
}

/// Returns the pid (pidfd_open(2)), which is not positive if the process is invisible from here or has exited. Before it
/// is reaped, it keeps its pid and procfs directory, but the pidfd is readable.
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
