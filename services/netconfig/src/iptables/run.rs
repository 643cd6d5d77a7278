//! Runs a program in a netns, with a script as input and a deadline.

use std::{
    fs::File,
    io::{self, Seek as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{self, Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use inpod_linux::Netns;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{
    child::{EXIT_LOCKED, EXIT_NOT_STARTED, Invocation, LOG_PREFIX},
    process::{ProcessOutput, RunningProcess},
};
use crate::backend::ProgramError;

/// iptables-legacy, if another process holds its lock (RESOURCE_PROBLEM in xshared.c).
const XTABLES_LOCK_HELD: (i32, &str) = (4, "xtables lock");

/// Of error output that is reported.
const MAX_MESSAGE_LINES: usize = 3;

#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) runner: &'a Path,
    pub(super) netns: Option<&'a Netns>,
    pub(super) program: &'a Path,
    pub(super) arguments: Vec<String>,
    pub(super) script: &'a str,
    /// The program's own lock file, and iptables-legacy's.
    pub(super) locks: Option<(PathBuf, PathBuf)>,
    pub(super) timeout: Duration,
}

#[derive(Debug)]
struct ProgramOutput {
    status: ExitStatus,
    output: String,
    errors: String,
    log_lines: Vec<String>,
}

impl Run<'_> {
    /// Waits here: the kernel kills the program when the calling thread ends.
    pub(super) fn output(&self) -> Result<String, ProgramError> {
        let deadline = Instant::now() + self.timeout;
        let child = self.start().map_err(|source| self.not_started(source))?;
        let output = RunningProcess(child).wait(deadline);
        let output = output.map_err(|source| self.not_started(source))?;
        let output = output.ok_or_else(|| ProgramError::TimedOut {
            program: self.name(),
            after: self.timeout,
        })?;
        self.check_output(ProgramOutput::new(&output))
    }

    fn start(&self) -> io::Result<Child> {
        let mut command = Command::new(self.runner);
        command
            .args(self.invocation().arguments())
            .env_clear()
            .env("LC_ALL", "C")
            .stdin(script(self.script)?)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some((_, xtables)) = &self.locks {
            command.env("XTABLES_LOCKFILE", xtables);
        }
        match self.netns {
            None => command.spawn(),
            Some(netns) => netns.within(|| command.spawn()).map_err(io::Error::other)?,
        }
    }

    fn invocation(&self) -> Invocation {
        Invocation {
            parent: process::id(),
            timeout: self.timeout / 2,
            lock: self.locks.as_ref().map(|(program, _)| program.clone()),
            program: self.program.to_owned(),
            arguments: self.arguments.clone(),
        }
    }

    fn check_output(&self, ended: ProgramOutput) -> Result<String, ProgramError> {
        for log_line in &ended.log_lines {
            tracing::debug!(
                program = self.name(),
                log_line,
                "Warning while starting a program"
            );
        }
        if ended.status.success() {
            return Ok(ended.output);
        }
        let log_line = || ended.log_lines.join("; ");
        let (code, message) = XTABLES_LOCK_HELD;
        match ended.status.code() {
            Some(EXIT_NOT_STARTED) => Err(self.not_started(io::Error::other(log_line()))),
            Some(EXIT_LOCKED) => Err(self.locked(|(program, _)| program)),
            Some(found) if found == code && ended.errors.contains(message) => {
                Err(self.locked(|(_, xtables)| xtables))
            }
            _ => Err(self.refused(&ended)),
        }
    }

    fn refused(&self, ended: &ProgramOutput) -> ProgramError {
        let lines = ended.errors.lines().map(str::trim);
        let output: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        ProgramError::Refused {
            program: self.name(),
            status: ended.status.to_string(),
            line: rejected_line(&ended.errors, self.script),
            message: output
                .into_iter()
                .take(MAX_MESSAGE_LINES)
                .collect::<Vec<_>>()
                .join("; "),
        }
    }

    fn locked(&self, which: impl Fn(&(PathBuf, PathBuf)) -> &PathBuf) -> ProgramError {
        let lock = self.locks.as_ref().map(which);
        ProgramError::Locked {
            lock: lock.map_or_else(String::new, |path| path.display().to_string()),
        }
    }

    fn not_started(&self, source: io::Error) -> ProgramError {
        ProgramError::Spawn {
            program: self.name(),
            source,
        }
    }

    fn name(&self) -> String {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        name.to_string_lossy().into_owned()
    }
}

/// Uses a file, not a pipe: nothing has to write while the program reads.
fn script(text: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create("script", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// Finds the line that a message refers to: "line: 2", "line 2 failed".
fn rejected_line(errors: &str, script: &str) -> Option<String> {
    let mut message = errors.split_whitespace();
    message.find(|word| matches!(*word, "line" | "line:"))?;
    let number: usize = message.next()?.trim_end_matches(':').parse().ok()?;
    let line = script.lines().nth(number.checked_sub(1)?)?;
    Some(line.to_owned())
}

impl ProgramOutput {
    fn new(output: &ProcessOutput) -> Self {
        let errors = String::from_utf8_lossy(&output.errors);
        let log_line = |line: &str| line.strip_prefix(LOG_PREFIX).map(str::to_owned);
        let message = errors.lines().filter(|line| log_line(line).is_none());
        Self {
            status: output.status,
            output: String::from_utf8_lossy(&output.output).into_owned(),
            errors: message.map(|line| format!("{line}\n")).collect(),
            log_lines: errors.lines().filter_map(log_line).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn the_line_that_is_complained_of_is_found() {
        let script = "*nat\n-X A\nCOMMIT\n";
        for (errors, line) in [
            ("iptables-restore: line 2 failed", Some("-X A")),
            ("bad\nError occurred at line: 2\nTry -h", Some("-X A")),
            (
                "line 2: CHAIN_DEL failed (Device or resource busy)",
                Some("-X A"),
            ),
            ("line 9 failed", None),
            ("line 0 failed", None),
            ("out of memory", None),
        ] {
            assert_eq!(rejected_line(errors, script).as_deref(), line, "{errors}");
        }
    }

    #[test]
    fn remarks_of_the_runner_are_not_the_programs_words() {
        let errors = b"run-program: cannot hide\nBad rule\n";
        let ended = ProgramOutput::new(&ProcessOutput {
            status: ExitStatus::from_raw(0),
            output: Vec::new(),
            errors: errors.to_vec(),
        });
        assert_eq!(ended.errors, "Bad rule\n");
        assert_eq!(ended.log_lines, ["cannot hide"]);
    }
}
