//! One run of a program: started in a netns, given a script, waited for until a deadline.

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
    ProgramError,
    child::{LOCKED, NOT_STARTED, Order, REMARK},
    process::{Said, Started},
};

/// What iptables-legacy says, and how it ends, when another process holds its lock (xshared.c; RESOURCE_PROBLEM).
const HELD: (i32, &str) = (4, "xtables lock");

/// How many lines of what a program says are repeated.
const MOST_LINES: usize = 3;

/// What is to be run.
#[derive(Debug)]
pub(super) struct Run<'a> {
    /// netconfig's own binary.
    pub(super) runner: &'a Path,
    /// In which netns; `None` for what needs none.
    pub(super) netns: Option<&'a Netns>,
    /// The program, by its absolute path.
    pub(super) program: &'a Path,
    pub(super) arguments: Vec<String>,
    pub(super) script: &'a str,
    /// What it holds while it runs, and what iptables-legacy locks.
    pub(super) locks: Option<(PathBuf, PathBuf)>,
    /// How long it may take.
    pub(super) patience: Duration,
}

/// How it ended, and what it said.
#[derive(Debug)]
struct Ended {
    status: ExitStatus,
    output: String,
    /// Without the runner's remarks.
    errors: String,
    remarks: Vec<String>,
}

impl Run<'_> {
    /// What it printed.
    ///
    /// The kernel ends the program when the calling thread ends, which therefore waits for it here.
    pub(super) fn output(&self) -> Result<String, ProgramError> {
        let deadline = Instant::now() + self.patience;
        let child = self.start().map_err(|source| self.not_started(source))?;
        let said = Started(child).wait(deadline);
        let said = said.map_err(|source| self.not_started(source))?;
        let said = said.ok_or_else(|| ProgramError::TimedOut {
            program: self.name(),
            after: self.patience,
        })?;
        self.judge(Ended::new(&said))
    }

    fn start(&self) -> io::Result<Child> {
        let mut command = Command::new(self.runner);
        command
            .args(self.order().arguments())
            .env_clear()
            // What it says is read.
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

    fn order(&self) -> Order {
        Order {
            parent: process::id(),
            patience: self.patience / 2,
            lock: self.locks.as_ref().map(|(program, _)| program.clone()),
            program: self.program.to_owned(),
            arguments: self.arguments.clone(),
        }
    }

    fn judge(&self, ended: Ended) -> Result<String, ProgramError> {
        for remark in &ended.remarks {
            tracing::debug!(program = self.name(), remark, "While starting a program");
        }
        if ended.status.success() {
            return Ok(ended.output);
        }
        let remark = || ended.remarks.join("; ");
        let (code, words) = HELD;
        match ended.status.code() {
            Some(NOT_STARTED) => Err(self.not_started(io::Error::other(remark()))),
            Some(LOCKED) => Err(self.locked(|(program, _)| program)),
            Some(found) if found == code && ended.errors.contains(words) => {
                Err(self.locked(|(_, xtables)| xtables))
            }
            _ => Err(self.refused(&ended)),
        }
    }

    fn refused(&self, ended: &Ended) -> ProgramError {
        let lines = ended.errors.lines().map(str::trim);
        let said: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        ProgramError::Refused {
            program: self.name(),
            status: ended.status.to_string(),
            line: blamed(&ended.errors, self.script),
            message: said
                .into_iter()
                .take(MOST_LINES)
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

/// As a file: nobody has to be there to write it while it is read.
fn script(text: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create("script", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// The line of the script that a program complains of: "line: 2", "line 2 failed".
fn blamed(errors: &str, script: &str) -> Option<String> {
    let mut words = errors.split_whitespace();
    words.find(|word| matches!(*word, "line" | "line:"))?;
    let number: usize = words.next()?.trim_end_matches(':').parse().ok()?;
    let line = script.lines().nth(number.checked_sub(1)?)?;
    Some(line.to_owned())
}

impl Ended {
    fn new(said: &Said) -> Self {
        let errors = String::from_utf8_lossy(&said.errors);
        let remark = |line: &str| line.strip_prefix(REMARK).map(str::to_owned);
        let words = errors.lines().filter(|line| remark(line).is_none());
        Self {
            status: said.status,
            output: String::from_utf8_lossy(&said.output).into_owned(),
            errors: words.map(|line| format!("{line}\n")).collect(),
            remarks: errors.lines().filter_map(remark).collect(),
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
            assert_eq!(blamed(errors, script).as_deref(), line, "{errors}");
        }
    }

    #[test]
    fn remarks_of_the_runner_are_not_the_programs_words() {
        let errors = b"run-program: cannot hide\nBad rule\n";
        let ended = Ended::new(&Said {
            status: ExitStatus::from_raw(0),
            output: Vec::new(),
            errors: errors.to_vec(),
        });
        assert_eq!(ended.errors, "Bad rule\n");
        assert_eq!(ended.remarks, ["cannot hide"]);
    }
}
