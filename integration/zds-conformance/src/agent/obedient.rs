//! A ztunnel that answers everything, on a thread of its own.

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

use super::peer::{Peer, Said};
use crate::case::{Outcome, Stop, failed};

/// How often it looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(20);

impl Peer {
    /// From here on answers every request after that pause, on a thread of its own.
    pub fn obey(self, pause: Duration) -> Obedient {
        let complete = self.snapshot_is_over();
        let view = Arc::new(Mutex::new(View {
            complete,
            ..View::default()
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, stopped) = (Arc::clone(&view), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Some(said) = self.within(LOOK)? {
                    thread::sleep(pause);
                    seen.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .learn(&said);
                    self.ack()?;
                }
            }
            Ok(self)
        });
        Obedient { view, stop, thread }
    }
}

/// What a ztunnel that obeys has been told.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every request, in order.
    pub said: Vec<String>,
    /// The pods that it serves.
    pub pods: BTreeSet<String>,
    /// Whether its snapshot has ended.
    pub complete: bool,
}

impl View {
    fn learn(&mut self, said: &Said) {
        self.said.push(said.words());
        match &said.payload {
            Payload::Add(add) => drop(self.pods.insert(add.uid.clone())),
            Payload::Keep(_) => {}
            Payload::Del(del) => drop(self.pods.remove(&del.uid)),
            Payload::SnapshotSent(_) => self.complete = true,
        }
    }
}

/// A ztunnel that answers everything.
#[derive(Debug)]
pub struct Obedient {
    view: Arc<Mutex<View>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome<Peer>>,
}

impl Obedient {
    /// What it has been told.
    pub fn view(&self) -> View {
        self.view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until it serves exactly these pods and its snapshot has ended.
    ///
    /// # Errors
    ///
    /// It does not come to that.
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
            thread::sleep(LOOK);
        }
    }

    /// Answers no more.
    ///
    /// # Errors
    ///
    /// What it saw that was against the rules.
    pub fn stop(self) -> Outcome<Peer> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(Stop::Broken("a played ztunnel panicked".to_owned())))
    }
}
