use std::{
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd},
    process::{Child, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

/// Room for more than 100,000 foreign rules.
const MAX_OUTPUT_BYTES: u64 = 64 * 1024 * 1024;

/// While the process's outputs are silent.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// After it has closed its outputs.
const EXIT_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// For a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct ProcessOutput {
    pub(super) status: ExitStatus,
    pub(super) output: Vec<u8>,
    pub(super) errors: Vec<u8>,
}

/// A process in its own process group, which is killed on drop.
pub(super) struct RunningProcess(pub(super) Child);

impl RunningProcess {
    /// Returns `None` after the deadline.
    pub(super) fn wait(&mut self, deadline: Instant) -> io::Result<Option<ProcessOutput>> {
        let (output, errors) = (self.0.stdout.take(), self.0.stderr.take());
        let (mut output, mut errors) = (Stream::new(output)?, Stream::new(errors)?);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            wait_for_either(&output, &errors, left)?;
            output.read()?;
            errors.read()?;
            // Its children may live on and keep the streams open; it has written everything itself.
            if (output.is_closed() && errors.is_closed()) || self.0.try_wait()?.is_some() {
                break;
            }
        }
        let Some(status) = self.ended_by(deadline)? else {
            return Ok(None);
        };
        output.read()?;
        errors.read()?;
        Ok(Some(ProcessOutput {
            status,
            output: output.bytes,
            errors: errors.bytes,
        }))
    }

    fn ended_by(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        loop {
            let ended = self.0.try_wait()?;
            if ended.is_some() || Instant::now() >= deadline {
                return Ok(ended);
            }
            thread::sleep(EXIT_POLL_INTERVAL);
        }
    }
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Ok(group) = i32::try_from(self.0.id()) {
            // Fails if it has ended meanwhile.
            killpg(Pid::from_raw(group), Signal::SIGKILL).unwrap_or_default();
        }
        let gone = self.ended_by(Instant::now() + KILL_TIMEOUT);
        if !matches!(gone, Ok(Some(_))) {
            tracing::warn!(pid = self.0.id(), "A killed program is still running");
        }
    }
}

struct Stream<T> {
    pipe: Option<T>,
    bytes: Vec<u8>,
}

impl<T: Read + AsFd> Stream<T> {
    fn new(pipe: Option<T>) -> io::Result<Self> {
        if let Some(pipe) = &pipe {
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Self {
            pipe,
            bytes: Vec::new(),
        })
    }

    fn is_closed(&self) -> bool {
        self.pipe.is_none()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    fn read(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.pipe else {
            return Ok(());
        };
        match pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut self.bytes) {
            Ok(_) => self.pipe = None,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if u64::try_from(self.bytes.len()).is_ok_and(|length| length < MAX_OUTPUT_BYTES) {
            Ok(())
        } else {
            Err(io::Error::other("the output is too long"))
        }
    }
}

fn wait_for_either<A: Read + AsFd, B: Read + AsFd>(
    output: &Stream<A>,
    errors: &Stream<B>,
    left: Duration,
) -> io::Result<()> {
    let open = [output.descriptor(), errors.descriptor()].into_iter();
    let mut open: Vec<_> = open
        .flatten()
        .map(|pipe| PollFd::new(pipe, PollFlags::POLLIN))
        .collect();
    let timeout = PollTimeout::try_from(left.min(EXIT_CHECK_INTERVAL)).unwrap_or(PollTimeout::ZERO);
    match poll(&mut open, timeout) {
        Ok(_) | Err(nix::Error::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::CommandExt as _,
        process::{Command, Stdio},
    };

    use super::*;

    fn started(shell: &str) -> RunningProcess {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", shell])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        RunningProcess(command.spawn().unwrap())
    }

    fn deadline_in_tests() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn more_than_a_pipe_holds_is_read_from_both_outputs() {
        let shell = "head -c 1000000 /dev/zero >&2; head -c 2000000 /dev/zero; exit 3";
        let output = started(shell).wait(deadline_in_tests()).unwrap().unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(
            (output.output.len(), output.errors.len()),
            (2_000_000, 1_000_000)
        );
    }

    #[test]
    fn what_does_not_end_in_time_is_killed_with_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        let shell = format!("sleep 600 & echo $! $$ > {}; wait", pids.display());
        let mut child = started(&shell);
        let pids = loop {
            let text = std::fs::read_to_string(&pids).unwrap_or_default();
            if text.ends_with('\n') {
                break text;
            }
            thread::sleep(EXIT_POLL_INTERVAL);
        };
        assert!(
            child
                .wait(Instant::now() + Duration::from_millis(20))
                .unwrap()
                .is_none()
        );
        drop(child);
        let deadline = deadline_in_tests();
        for pid in pids.split_whitespace() {
            // Another process reaps the grandchild at its leisure.
            let runs = || {
                let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                status.is_ok_and(|status| !status.contains(") Z "))
            };
            while runs() {
                assert!(Instant::now() < deadline, "{pid} runs on");
                thread::sleep(EXIT_POLL_INTERVAL);
            }
        }
    }

    #[test]
    fn an_output_that_is_held_by_a_grandchild_is_not_waited_for() {
        let mut child = started("sleep 600 & echo done");
        let began = Instant::now();
        let output = child.wait(deadline_in_tests()).unwrap().unwrap();
        assert!(output.status.success() && began.elapsed() < Duration::from_secs(20));
        assert_eq!(output.output, b"done\n");
        let group = Pid::from_raw(child.0.id().try_into().unwrap());
        killpg(group, Signal::SIGKILL).unwrap();
    }
}
