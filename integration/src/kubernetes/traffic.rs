//! Opens new connections one after the other, in the background.

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

/// The pause between two requests.
const PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Report>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub answered: usize,
    /// The failed requests, with the time since the start and the error.
    pub failed: Vec<(Duration, String)>,
    pub slowest: Duration,
}

impl Traffic {
    /// Starts the requests, which keep the netns open.
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

    pub fn end(self) -> anyhow::Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the client died"))
    }
}

/// Sends a request, and returns the body of the answer, whose status must be 200.
pub fn get(from: &Netns, to: SocketAddr) -> anyhow::Result<String> {
    ask(from, to, "/").map(|(_, body)| body)
}

/// Sends a request, and returns the body of the answer and the client's address.
pub fn ask(from: &Netns, to: SocketAddr, path: &str) -> anyhow::Result<(SocketAddr, String)> {
    let mut stream = connect(from, to)?;
    let here = stream.local_addr()?;
    // Envoy answers no HTTP/1.0.
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    ensure!(head.contains(" 200 "), "{head:?}");
    Ok((here, body.to_owned()))
}
