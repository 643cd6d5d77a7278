//! Runs clients in pods, which connect at a constant rate and record each outcome.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use inpod_linux::Netns;
use socket2::{Domain, Socket, Type};

use crate::{Access, Pod, TIMEOUT, eventually, source_seen};

/// The time for a connection, and again for the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Attempt {
    pub uid: String,
    pub at: Instant,
    /// The client's address, or None if not even a port could be bound.
    pub from: Option<SocketAddr>,
    /// The source address that the application saw, or the error.
    pub outcome: Result<IpAddr, String>,
}

/// A client in each pod, connecting at a constant rate.
#[derive(Debug)]
pub struct Clients {
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
    threads: Vec<JoinHandle<anyhow::Result<Vec<Attempt>>>>,
}

impl Clients {
    /// Starts the clients, whose attempts are spread over the period.
    pub fn start(pods: &[&Pod], to: SocketAddr, period: Duration) -> Self {
        let places = pods.iter().map(|pod| (pod.spec.uid.as_str(), pod.path()));
        Self::start_in(&places.collect::<Vec<_>>(), to, period)
    }

    /// Starts clients in any netns; each has a name instead of a UID.
    pub fn start_in(places: &[(&str, &Path)], to: SocketAddr, period: Duration) -> Self {
        let (stop, made) = (Arc::default(), Arc::default());
        let spread = period / u32::try_from(places.len().max(1)).unwrap_or(u32::MAX);
        let threads = places.iter().zip(0_u32..).map(|((uid, netns), turn)| {
            let client = Client {
                uid: (*uid).to_owned(),
                to,
                period,
                stop: Arc::clone(&stop),
                made: Arc::clone(&made),
            };
            let netns = netns.to_path_buf();
            thread::spawn(move || {
                thread::sleep(spread * turn);
                client.run(&netns)
            })
        });
        Self {
            threads: threads.collect(),
            stop,
            made,
        }
    }

    pub fn make(&self, more: u64) -> anyhow::Result<()> {
        let wanted = self.made.load(Ordering::Relaxed) + more;
        eventually("connections are made", TIMEOUT, || {
            let made = self.made.load(Ordering::Relaxed);
            ensure!(made >= wanted, "{made} of {wanted}");
            anyhow::Ok(())
        })
    }

    pub fn stop(self) -> anyhow::Result<Vec<Attempt>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for thread in self.threads {
            let attempts = thread.join().ok().context("a client has panicked")?;
            all.extend(attempts?);
        }
        Ok(all)
    }
}

struct Client {
    uid: String,
    to: SocketAddr,
    period: Duration,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
}

impl Client {
    fn run(self, netns: &Path) -> anyhow::Result<Vec<Attempt>> {
        let netns = Netns::open(netns, &["/run/netns".into()])?;
        Ok(netns.within(|| self.attempts())?)
    }

    fn attempts(&self) -> Vec<Attempt> {
        let mut attempts = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let at = Instant::now();
            let mut from = None;
            let outcome = self.attempt(&mut from);
            attempts.push(Attempt {
                uid: self.uid.clone(),
                at,
                from,
                outcome: outcome.map_err(|error| format!("{error:#}")),
            });
            self.made.fetch_add(1, Ordering::Relaxed);
            thread::sleep(self.period.saturating_sub(at.elapsed()));
        }
        attempts
    }

    fn attempt(&self, from: &mut Option<SocketAddr>) -> anyhow::Result<IpAddr> {
        let socket = Socket::new(Domain::for_address(self.to), Type::STREAM, None)?;
        let connected = socket.connect_timeout(&self.to.into(), ANSWER_TIMEOUT);
        *from = socket.local_addr().ok().and_then(|it| it.as_socket());
        connected.context("cannot connect")?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(source_seen(socket.into())?.0)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub made: usize,
    pub failed: usize,
    /// The number of connections that each ztunnel accepted, in the order of the logs.
    pub taken_by: Vec<usize>,
    /// The number of successful attempts that bypassed every ztunnel.
    pub around: usize,
}

/// Counts the attempts by outcome and path. The logs of the ztunnels are the evidence of the path.
pub fn tally(attempts: &[Attempt], logs: &[Vec<Access>]) -> Tally {
    let mut tally = Tally {
        made: attempts.len(),
        taken_by: vec![0; logs.len()],
        ..Tally::default()
    };
    let taken: Vec<_> = logs.iter().map(|log| sources(log)).collect();
    for attempt in attempts {
        if attempt.outcome.is_err() {
            tally.failed += 1;
            continue;
        }
        let key = attempt.from.map(|from| (attempt.uid.clone(), from));
        let by = key.and_then(|key| taken.iter().position(|log| log.contains(&key)));
        match by.and_then(|by| tally.taken_by.get_mut(by)) {
            Some(count) => *count += 1,
            None => tally.around += 1,
        }
    }
    tally
}

pub fn sources(log: &[Access]) -> BTreeSet<(String, SocketAddr)> {
    let outbound = log
        .iter()
        .filter(|access| access.event == "accepted" && access.listener == 15001);
    outbound
        .filter_map(|access| Some((access.uid.clone(), access.source?)))
        .collect()
}
