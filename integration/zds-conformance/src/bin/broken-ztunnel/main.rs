//! A ztunnel with a single fault, to test the kit; the program serves no traffic.
#![expect(
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a small program for tests; a thread that enters a netns ends there"
)]

mod done;
mod listeners;
mod ztunnel;

use std::{path::PathBuf, process::ExitCode};

use ztunnel::Ztunnel;

/// The names of all faults, as on the command line.
const FAULTS: &[&str] = &[
    "none",
    "no-hello",
    "hello-late",
    "wrong-version",
    "ack-twice",
    "ack-nothing",
    "swallow-one-ack",
    "keepalive",
    "acks-out-of-order",
    "listeners-in-own-netns",
    "two-listeners",
    "unmarked-listeners",
    "ack-before-listening",
    "del-ignored",
    "exit-on-unknown-del",
    "restart-on-same-netns",
    "stay-in-old-netns",
    "stop-at-disconnect",
    "stop-before-snapshot-sent",
    "keep-nothing",
    "never-stop-the-unnamed",
    "del-in-snapshot-ignored",
    "names-outlive-the-connection",
    "ack-start-failures",
    "nack-closes",
    "pending-blocks",
    "pending-half-open",
    "pending-survives",
    "pending-survives-del",
    "pending-add-ignored",
    "del-in-snapshot-sticks",
    "leak-fd",
    "leak-refused-fd",
    "small-buffer",
    "large-buffer",
    "strict-fields",
    "no-descriptor-accepted",
    "silent-read-error",
    "read-error-stops-pods",
    "exit-on-read-error",
    "second-snapshot-accepted",
    "keep-after-snapshot-accepted",
    "no-info-accepted",
    "no-reconnect",
    "impatient",
    "gives-up-early",
    "hello-with-unknown-field",
    "gives-up-on-silence",
    "stops-pods-later",
    "backoff-of-60s",
    "loopback-only",
    "v4-only",
    "v6-only",
    "never-accepts",
    "no-reuseport",
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (socket, fault) = match (arguments.next(), arguments.next()) {
        (Some(socket), Some(fault)) => (socket, fault),
        (Some(option), None) if option == "--version" => {
            println!("broken-ztunnel {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        (option, _) => {
            let usage = format!(
                "broken-ztunnel SOCKET FAULT\n\nFaults:\n  {}",
                FAULTS.join("\n  ")
            );
            if option.as_deref() == Some("--help") {
                println!("{usage}");
                return ExitCode::SUCCESS;
            }
            eprintln!("{usage}");
            return ExitCode::from(2);
        }
    };
    if !FAULTS.contains(&fault.as_str()) {
        eprintln!("no fault {fault}");
        return ExitCode::from(2);
    }
    let ztunnel = Ztunnel::new(fault);
    match ztunnel.and_then(|ztunnel| ztunnel.serve(&PathBuf::from(socket))) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}
