//! Checks from inside a pod, as the user of the pod's proxy and without privileges, that the pod's traffic is
//! redirected.
//!
//! In sidecar mode, the rules redirect connections of the proxy's user over `lo`, except connections to 127.0.0.1 and
//! ::1, to the proxy's inbound port (services/docs/facts/istio-sidecar.md, 4.3, rule 10a). This program runs as the
//! same user and listens on the proxy's inbound port before the proxy does. It connects to another loopback address, at
//! a port without a listener, and checks whether the connection arrives at its own listener.
//!
//! [`arguments`] and [`verdict`] do no I/O, [`probe_target`] selects addresses, [`probe`] connects, and [`table`] finds
//! the receiver if another process already listens. The program has one thread, and every wait has a timeout.

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

/// The kubelet reads the termination message from this file (Kubernetes, `terminationMessagePath`).
const TERMINATION_LOG: &str = "/dev/termination-log";

pub fn main() -> ExitCode {
    let command = arguments::parse(std::env::args_os().skip(1), |name| std::env::var_os(name));
    let verdict = match command {
        Ok(Command::Print(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Ok(Command::Validate(settings)) => validate(&settings),
        Err(error) => {
            let verdict = Verdict::usage(&error);
            writeln!(io::stderr(), "{}", verdict.line).unwrap_or_default();
            write_termination_message(Path::new(TERMINATION_LOG), &verdict.line);
            return ExitCode::from(verdict.code);
        }
    };
    print(&format!("{}\n", verdict.line));
    write_termination_message(Path::new(TERMINATION_LOG), &verdict.line);
    ExitCode::from(verdict.code)
}

/// Probes until redirection is proven for every family, or until the timeout.
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

/// Prints a text and ignores errors: standard output may be closed, and the exit code still shows the result.
fn print(text: &str) {
    io::stdout().write_all(text.as_bytes()).unwrap_or_default();
}

/// Writes the termination message only to an existing file, which the kubelet makes writable for every user.
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
    fn the_termination_message_replaces_the_earlier_one_and_no_file_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("termination-log");
        write_termination_message(&file, "validate: not written");
        assert!(!file.exists());
        std::fs::write(&file, "an earlier and longer line").unwrap();
        write_termination_message(&file, "validate: short");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "validate: short");
    }
}
