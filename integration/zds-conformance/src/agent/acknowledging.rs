//! A played ztunnel with a thread of its own, which acknowledges every request.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use zds_client::proto::workload_request::Payload;

use super::peer::{Peer, Request};
use crate::case::{Outcome, Stop, failed};

/// The interval between checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Peer {
    /// Answers each request after `pause`, on a separate thread.
    pub fn acknowledge_all(self, pause: Duration) -> Acknowledging {
        let complete = self.snapshot_is_over();
        let view = Arc::new(Mutex::new(View {
            complete,
            ..View::default()
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, stopped) = (Arc::clone(&view), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Some(request) = self.within(POLL_INTERVAL)? {
                    thread::sleep(pause);
                    seen.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .learn(&request);
                    self.ack()?;
                }
            }
            Ok(self)
        });
        Acknowledging { view, stop, thread }
    }
}

#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every received request, in order.
    pub requests: Vec<String>,
    pub pods: BTreeSet<String>,
    /// The agent has sent the end of the snapshot.
    pub complete: bool,
}

impl View {
    fn learn(&mut self, request: &Request) {
        self.requests.push(request.describe());
        match &request.payload {
            Payload::Add(add) => drop(self.pods.insert(add.uid.clone())),
            Payload::Keep(_) => {}
            Payload::Del(del) => drop(self.pods.remove(&del.uid)),
            Payload::SnapshotSent(_) => self.complete = true,
        }
    }
}

#[derive(Debug)]
pub struct Acknowledging {
    view: Arc<Mutex<View>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome<Peer>>,
}

impl Acknowledging {
    pub fn view(&self) -> View {
        self.view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until the view has exactly these pods and a complete snapshot.
    pub fn await_pods(&self, pods: &BTreeSet<String>, within: Duration) -> Outcome {
        let end = Instant::now() + within;
        loop {
            let view = self.view();
            if view.complete && view.pods == *pods {
                return Ok(());
            }
            if Instant::now() >= end || self.thread.is_finished() {
                let seen = format!("{:?}, snapshot ended: {}", view.pods, view.complete);
                return failed(format!("a ztunnel that knows {pods:?}"), seen);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Stops the thread, and fails if the thread observed a violation of the contract.
    pub fn stop(self) -> Outcome<Peer> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(Stop::Broken("a played ztunnel panicked".to_owned())))
    }
}
