//! Proves from inside a pod, as its proxy's user and without a right, that its traffic is redirected.
//!
//! The rules of sidecar mode send what the proxy's user calls over `lo`, but for 127.0.0.1 and ::1, to the proxy's inbound
//! port (istio-sidecar-install, 4.3, rule 10a). So this program, run as that user, calls a port that nobody listens on at
//! such an address, listens where the proxy will, and looks whether its own call arrives there.
//!
//! [`arguments`] is what is asked for, [`place`] where a family is called, [`probe`] one family's calls, [`table`] the
//! witness where somebody else listens already, [`verdict`] what it all means; the first and the last are pure. There is
//! one thread and no wait without an end.

pub mod arguments;
pub mod probe;
pub mod probe_target;
pub mod table;
pub mod verdict;

use std::{
    fs::OpenOptions,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    time::Instant,
};

use crate::{
    arguments::{Command, Settings},
    verdict::Verdict,
};

/// Where the kubelet reads a container's last words (Kubernetes, `terminationMessagePath`).
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Runs the program.
pub fn main() -> ExitCode {
    let command = arguments::parse(std::env::args_os().skip(1), |name| std::env::var_os(name));
    let verdict = match command {
        Ok(Command::Print(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Ok(Command::Validate(settings)) => validate(&settings),
        Err(error) => Verdict::usage(&error),
    };
    print(&format!("{}\n", verdict.line));
    write_termination_message(Path::new(TERMINATION_LOG), &verdict.line);
    ExitCode::from(verdict.code)
}

/// Looks, until everything is proven or the time is over.
pub fn validate(settings: &Settings) -> Verdict {
    let deadline = Instant::now() + settings.timeout;
    let uid = nix::unistd::geteuid().as_raw();
    let targets = match probe_target::local_addresses() {
        Ok(addresses) => probe_target::select(settings.families, &addresses),
        Err(error) => return Verdict::unknown(&error.to_string()),
    };
    match targets {
        Ok(targets) => {
            let results = probe::all(&targets, &settings.ports, deadline);
            verdict::evaluate(&results, settings, uid)
        }
        Err(why) => Verdict::unknown(&why),
    }
}

/// Standard output may be closed; the exit code still tells.
fn print(text: &str) {
    io::stdout().write_all(text.as_bytes()).unwrap_or_default();
}

/// Only where there is such a file, which a kubelet makes writable for every user.
fn write_termination_message(file: &Path, line: &str) {
    let opened = OpenOptions::new().write(true).truncate(true).open(file);
    if let Ok(mut file) = opened {
        file.write_all(line.as_bytes()).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_replace_what_was_there_and_no_file_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("termination-log");
        write_termination_message(&file, "validate: nobody reads this");
        assert!(!file.exists());
        std::fs::write(&file, "an earlier and longer line").unwrap();
        write_termination_message(&file, "validate: short");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "validate: short");
    }
}
