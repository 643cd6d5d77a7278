//! New connections, one after the other, for as long as something goes on.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{anyhow, ensure};
use inpod_linux::Netns;

use crate::connect;

/// How long after the end of a request the next one begins.
const PAUSE: Duration = Duration::from_millis(20);

/// Requests over HTTP, each by a connection of its own.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Report>,
}

/// What came of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many were answered.
    pub answered: usize,
    /// When those failed that did, from the beginning on, and why.
    pub failed: Vec<(Duration, String)>,
    /// The longest that one took.
    pub slowest: Duration,
}

impl Traffic {
    /// Begins. The client's sockets are in a netns that is the traffic's own to hold.
    pub fn start(from: Netns, to: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let (began, mut report) = (Instant::now(), Report::default());
            while !stopped.load(Ordering::Relaxed) {
                let asked = Instant::now();
                match get(&from, to) {
                    Ok(_) => report.answered += 1,
                    Err(error) => report.failed.push((began.elapsed(), format!("{error:#}"))),
                }
                report.slowest = report.slowest.max(asked.elapsed());
                thread::sleep(PAUSE);
            }
            report
        });
        Self { stop, thread }
    }

    /// Ends after the request under way.
    ///
    /// # Errors
    ///
    /// When the thread has panicked.
    pub fn end(self) -> anyhow::Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the client died"))
    }
}

/// One request; the body of the answer.
///
/// # Errors
///
/// When it is not answered with 200 in time.
pub fn get(from: &Netns, to: SocketAddr) -> anyhow::Result<String> {
    ask(from, to, "/").map(|(_, body)| body)
}

/// The same for another path than `/`; with the address that was asked from.
///
/// # Errors
///
/// As [`get`].
pub fn ask(from: &Netns, to: SocketAddr, path: &str) -> anyhow::Result<(SocketAddr, String)> {
    let mut stream = connect(from, to)?;
    let here = stream.local_addr()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    ensure!(head.contains(" 200 "), "{head:?}");
    Ok((here, body.to_owned()))
}
