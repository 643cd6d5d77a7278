//! The door of ZDS: who is let in, who waits, who is sent away, and how fast.
//!
//! Two paces. A look at whoever connects is cheap and quick, so that a queue of impostors is soon gone and a ztunnel
//! behind them is reached; it is bounded, so that impostors that reconnect for ever (stock ztunnel, refused, does so
//! 16,000 times a second) cost little of a core. A session begins slowly, and only who was admitted takes a step of
//! that. What is held in memory and descriptors at once is bounded in all and for each process or pod, so that one
//! that connects a thousand times takes nobody else's place.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};

use inpod_service::vital;
use inpod_types::with_causes;

use crate::{
    hub::Hub,
    pace::Pace,
    peer::{Candidate, Impostor, Peer, Policy},
    places::{Place, Places},
    refusals::Refusals,
    zds,
};

/// How many connections are looked at in a second. With a debug build, which takes 0.3 ms for a look, a storm without
/// end costs a sixth of a core (integration/tests/zds_storm.rs); a queue of [`BACKLOG`] is gone in two seconds.
const LOOKS_PER_SECOND: u32 = 500;

/// How many connections wait in the kernel to be looked at; a ztunnel that finds the queue full tries again later and
/// later (after 15 s at the latest).
pub(crate) const BACKLOG: i32 = 1024;

/// How many sessions begin in a second.
const SESSIONS_PER_SECOND: u32 = 5;

/// How many may be admitted at once, whether their session has begun or not. A node has one ztunnel, two during an
/// upgrade.
const MOST_ADMITTED: usize = 16;

/// How many of them may be of one process. A ztunnel has one connection; what it left behind is seen at once.
const MOST_OF_ONE_PROCESS: usize = 8;

/// How many may wait for pod-events to say that they are ztunnels.
const MOST_HELD: usize = 16;

/// How many of them may be of one cgroup.
const MOST_OF_ONE_CGROUP: usize = 2;

/// How long they may. One that is sent away connects again.
const HOLD: Duration = Duration::from_secs(10);

/// How long to wait before the next try when no connection can be taken.
const AGAIN: Duration = Duration::from_millis(100);

/// Who is let in, and who is there.
#[derive(Debug)]
pub(crate) struct Door {
    hub: Arc<Hub>,
    policy: Policy,
    admitted: Arc<Places<i32>>,
    held: Arc<Places<String>>,
    pace: tokio::sync::Mutex<Pace>,
    refusals: Mutex<Refusals>,
}

impl Door {
    pub(crate) fn new(hub: Arc<Hub>, policy: Policy) -> Arc<Self> {
        Arc::new(Self {
            hub,
            policy,
            admitted: Places::new(MOST_ADMITTED, MOST_OF_ONE_PROCESS),
            held: Places::new(MOST_HELD, MOST_OF_ONE_CGROUP),
            pace: tokio::sync::Mutex::new(Pace::new(SESSIONS_PER_SECOND)),
            refusals: Mutex::default(),
        })
    }

    /// Serves whoever comes, for ever. When dropped, all connections close.
    pub(crate) async fn serve(self: Arc<Self>, mut listener: UnixSeqpacketListener) -> Infallible {
        let mut connections = JoinSet::new();
        let mut pace = Pace::new(LOOKS_PER_SECOND);
        loop {
            pace.step().await;
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(socket) => Arc::clone(&self).look(socket, &mut connections),
                    Err(error) => {
                        // Out of descriptors, most likely: some will come back.
                        tracing::error!(%error, "Cannot accept a ztunnel");
                        sleep(AGAIN).await;
                    }
                },
                Some(_) = connections.join_next(), if !connections.is_empty() => pace.give_back(),
            }
        }
    }

    /// Sends a connection away, or has it taken care of.
    fn look(self: Arc<Self>, socket: UnixSeqpacket, connections: &mut JoinSet<()>) {
        let looked = self.policy.look(&socket).and_then(|candidate| {
            let ztunnels = self.hub.ztunnels();
            let verdict = self.policy.admit(&candidate, ztunnels.borrow().as_ref());
            match verdict {
                Ok(peer) => self.seat(peer).map(Welcome::Now),
                Err(error) if error.may_be_welcome_later() => {
                    let place = self.held.take(error.whence()).ok_or(error)?;
                    Ok(Welcome::Later(candidate, place))
                }
                Err(error) => Err(error),
            }
        });
        match looked {
            // One that panics may leave the ledger half changed, for all the others.
            Ok(Welcome::Now(seated)) => {
                connections.spawn(vital("session", self.attend(socket, seated)));
            }
            Ok(Welcome::Later(candidate, place)) => {
                connections.spawn(vital("session", self.hold(socket, candidate, place)));
            }
            Err(error) => self.refuse(&error),
        }
    }

    /// A place for one who is admitted.
    fn seat(&self, peer: Peer) -> Result<Seated, Impostor> {
        match self.admitted.take(peer.pid) {
            Some(place) => Ok(Seated { peer, place }),
            None => Err(Impostor::TooMany {
                pid: peer.pid,
                cgroup: peer.cgroup,
            }),
        }
    }

    /// Keeps one waiting who may be said to be a ztunnel.
    async fn hold(
        self: Arc<Self>,
        socket: UnixSeqpacket,
        candidate: Candidate,
        place: Place<String>,
    ) {
        tracing::debug!("Holding a connection to ZDS: it may be a ztunnel that was not named yet");
        let waited = self.wait(&candidate).await;
        drop((candidate, place));
        match waited.and_then(|peer| self.seat(peer)) {
            Ok(seated) => self.attend(socket, seated).await,
            Err(error) => self.refuse(&error),
        }
    }

    async fn wait(&self, candidate: &Candidate) -> Result<Peer, Impostor> {
        let until = Instant::now() + HOLD;
        let mut ztunnels = self.hub.ztunnels();
        loop {
            let verdict = self
                .policy
                .admit(candidate, ztunnels.borrow_and_update().as_ref());
            match verdict {
                Err(error) if error.may_be_welcome_later() => {
                    match timeout_at(until, ztunnels.changed()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) | Err(_) => return Err(error),
                    }
                }
                verdict => return verdict,
            }
        }
    }

    /// A session, from its turn to its end.
    async fn attend(self: Arc<Self>, socket: UnixSeqpacket, seated: Seated) {
        let Seated { peer, place } = seated;
        // In the order in which they were admitted.
        self.pace.lock().await.step().await;
        zds::attend(socket, &self.hub, peer).await;
        drop(place);
    }

    fn refuse(&self, error: &Impostor) {
        self.hub.metrics().refused();
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now().into_std();
        if let Some(more) = refusals.count(&error.whence(), now) {
            let error = with_causes(error);
            tracing::warn!(target: "audit", error, unwritten = more, "Refused a connection to ZDS");
        }
    }
}

enum Welcome {
    Now(Seated),
    Later(Candidate, Place<String>),
}

/// One who is admitted, with a place.
#[derive(Debug)]
struct Seated {
    peer: Peer,
    place: Place<i32>,
}
