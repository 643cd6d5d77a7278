//! An agent with a single fault, to test the kit; the program is also its own driver.
#![expect(
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a small program for tests; the driver's time is in the environment"
)]

mod session;
mod state;

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use state::Agent;
use zds_conformance::wire::Listener;

/// The names of all faults, as on the command line.
const FAULTS: &[&str] = &[
    "none",
    "world-socket",
    "stale-socket-fatal",
    "before-hello",
    "before-set",
    "no-hello-timeout",
    "hello-unchecked",
    "hello-strict",
    "second-hello-ignored",
    "two-fds",
    "no-fd",
    "fd-on-del",
    "fd-on-snapshot",
    "wrong-netns",
    "no-netns",
    "o-path",
    "no-info",
    "empty-datagram",
    "too-long",
    "pipelined",
    "second-snapshot",
    "keep-after-snapshot",
    "no-end",
    "leaves-one-out",
    "names-one-twice",
    "credits-late-ack",
    "early-success",
    "credits-close",
    "unasked-ignored",
    "garbage-credited",
    "nack-credited",
    "small-buffer",
    "no-del-after-nack",
    "never-retries",
    "forgets-del",
    "resurrects",
    "netns-change-ignored",
    "old-netns-credited",
    "info-change-ignored",
    "half-close-ignored",
    "latest-only",
    "head-of-line",
    "unpaced",
    "leak-fd",
    "leak-fd-at-move",
    "voided-ack-credited",
    "caller-ends-session",
    "info-in-snapshot-ignored",
    "dels-last",
    "snapshot-ends-last",
];

const USAGE: &str = "\
broken-agent serve SOCKET CONTROL FAULT ACK_TIMEOUT_MS
broken-agent drive CONTROL begin|seed|add|remove ...

Faults:";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["serve", socket, control, fault, timeout] if FAULTS.contains(fault) => {
            serve(socket, control, fault, timeout)
        }
        ["drive", control, call @ ..] => drive(control, call),
        [option] => return answer(option),
        _ => return answer(""),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Answers `--version` and `--help`; every other option is an error.
fn answer(option: &str) -> ExitCode {
    match option {
        "--version" => println!("broken-agent {}", env!("CARGO_PKG_VERSION")),
        "--help" => println!("{USAGE}\n  {}", FAULTS.join("\n  ")),
        _ => {
            eprintln!("{USAGE}\n  {}", FAULTS.join("\n  "));
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn serve(socket: &str, control: &str, fault: &str, timeout: &str) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let timeout = Duration::from_millis(timeout.parse().map_err(io::Error::other)?);
    let agent = Arc::new(Agent::new(fault, timeout));
    if agent.is("stale-socket-fatal") && Path::new(socket).exists() {
        return Err(io::Error::other("the socket exists"));
    }
    let mut listener = Listener::bind(runtime.handle(), Path::new(socket))?;
    let mode = if agent.is("world-socket") {
        0o666
    } else {
        0o600
    };
    fs::set_permissions(socket, fs::Permissions::from_mode(mode))?;
    drop(fs::remove_file(control));
    let calls = UnixListener::bind(control)?;
    let called = Arc::clone(&agent);
    thread::spawn(move || {
        for call in calls.incoming().flatten() {
            let agent = Arc::clone(&called);
            thread::spawn(move || take_call(&agent, call));
        }
    });
    let mut tokens = 5.0_f64;
    let mut last = Instant::now();
    loop {
        tokens = (tokens + last.elapsed().as_secs_f64() * 5.0).min(5.0);
        last = Instant::now();
        if tokens < 1.0 && !agent.is("unpaced") {
            thread::sleep(Duration::from_millis(20));
            continue;
        }
        if let Some(connection) = listener.accept(Duration::from_millis(100))? {
            tokens -= 1.0;
            let agent = Arc::clone(&agent);
            thread::spawn(move || session::attend(&agent, &connection));
        }
    }
}

/// Executes a call of the driver, which sends its arguments, one per line, up to the end of the stream; the answer is
/// `ok` or an error.
fn take_call(agent: &Agent, mut stream: UnixStream) {
    let mut text = String::new();
    if stream.read_to_string(&mut text).is_err() {
        return;
    }
    let lines: Vec<_> = text.lines().collect();
    let outcome = match lines.as_slice() {
        ["begin", ..] => Ok(()),
        ["seed", _, workloads @ ..] => agent.seed(workloads),
        ["add", seconds, workload] => agent.add(workload, seconds.parse().unwrap_or(1.0)),
        ["remove", _, uid] => {
            agent.remove(uid);
            Ok(())
        }
        _ => Err("no such call".to_owned()),
    };
    let answer = outcome.err().unwrap_or_else(|| "ok".to_owned());
    // The answer fails if the caller is gone.
    drop(stream.write_all(answer.as_bytes()));
}

fn drive(control: &str, call: &[&str]) -> io::Result<()> {
    let seconds: f64 = std::env::var("ZDS_DRIVER_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(10.0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut stream = loop {
        match UnixStream::connect(control) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    let (verb, words) = call
        .split_first()
        .ok_or_else(|| io::Error::other("no call"))?;
    let mut rest = words.join(" ");
    if *verb == "seed" {
        io::stdin().read_to_string(&mut rest)?;
    }
    stream.write_all(format!("{verb}\n{seconds}\n{rest}").as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer == "ok" {
        Ok(())
    } else {
        Err(io::Error::other(answer))
    }
}
