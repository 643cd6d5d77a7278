//! Admission of connections to the ZDS socket: decides which connections get a session or wait, and how fast.
//!
//! There are two rates. Peers are checked at a high rate, so that a ztunnel behind a backlog of impostors is soon
//! reached. The rate is still bounded, so that impostors that reconnect forever (a refused stock ztunnel does so 16,000
//! times per second) cost only a fraction of a core. Sessions start slowly. Memory and descriptors are bounded in total
//! and per cgroup, so that no peer displaces another.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use inpod_service::abort_on_panic;
use tokio::{
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout_at},
};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};

use crate::{
    hub::Hub,
    peer::{Candidate, NotAdmitted, Peer, Policy},
    zds,
};

/// The time between two checks. In a debug build, where a check takes 0.3 ms, an endless storm costs a sixth of a core
/// (integration/tests/scenarios/alone/zds_storm.rs), and a backlog of [`zds::LISTEN_BACKLOG`] is gone in two seconds.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// The time between the starts of two sessions, each of which sends the whole desired set.
const SESSION_INTERVAL: Duration = Duration::from_millis(200);

/// The number of connections, in total and per origin. A node has one ztunnel, or two during an upgrade; a ztunnel has a
/// single connection, and the end of an earlier connection is noticed at once.
const MAX_CONNECTIONS: (usize, usize) = (32, 8);

/// The number of connections up to which peers may wait until pod-events reports them as ztunnels. The remaining places
/// are for known ztunnels.
const MAX_WAITING: (usize, usize) = (16, 2);

/// The maximum wait of a peer. A refused ztunnel connects again.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(10);

const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Admission {
    hub: Arc<Hub>,
    policy: Policy,
    places: Places,
    session_starts: tokio::sync::Mutex<Interval>,
}

/// Serves the socket. Dropping the future closes all connections.
pub async fn serve(
    mut listener: UnixSeqpacketListener,
    hub: Arc<Hub>,
    policy: Policy,
) -> Infallible {
    let admission = Arc::new(Admission {
        hub,
        policy,
        places: Places::default(),
        session_starts: tokio::sync::Mutex::new(at_least_every(SESSION_INTERVAL)),
    });
    let mut connections = JoinSet::new();
    let mut checks = at_least_every(CHECK_INTERVAL);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(socket) => {
                    if let Err(refusal) = admission.dispatch(socket, &mut connections) {
                        admission.refuse(&refusal);
                    }
                    checks.tick().await;
                }
                Err(error) => {
                    // Most likely, the process is out of file descriptors; some will be released.
                    tracing::error!(%error, "Cannot accept a ztunnel");
                    sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

/// Returns an interval whose ticks are never closer to each other than the period.
fn at_least_every(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

impl Admission {
    /// Starts the task of a connection, unless the peer is refused at once.
    fn dispatch(
        self: &Arc<Self>,
        socket: UnixSeqpacket,
        connections: &mut JoinSet<()>,
    ) -> Result<(), NotAdmitted> {
        let candidate = self.policy.identify(&socket)?;
        let ztunnels = self.hub.ztunnels();
        let admitted = self.policy.admit(&candidate, ztunnels.borrow().as_ref());
        let place = match admitted {
            Ok(peer) => self.places.take(&peer.origin(), MAX_CONNECTIONS)?,
            Err(refusal) if refusal.may_come => {
                let place = self.places.take(&refusal.origin, MAX_WAITING)?;
                let why = &refusal.why;
                tracing::debug!(
                    why,
                    "Holding a connection to ZDS: it may be a ztunnel that was not named yet"
                );
                place
            }
            Err(refusal) => return Err(refusal),
        };
        let this = Arc::clone(self);
        let running = async move { this.run(socket, candidate, place).await };
        // A panic may leave the state that all sessions share half changed, so the process aborts.
        connections.spawn(abort_on_panic("session", running));
        Ok(())
    }

    /// Waits until a peer is admitted, then runs its session. Sessions start in the order in which their peers were
    /// admitted.
    async fn run(&self, socket: UnixSeqpacket, candidate: Candidate, place: Place) {
        let admitted = self.wait_for_admission(&candidate).await;
        drop(candidate);
        match admitted {
            Ok(peer) => {
                self.session_starts.lock().await.tick().await;
                zds::serve_session(socket, &self.hub, peer).await;
            }
            Err(refusal) => self.refuse(&refusal),
        }
        drop(place);
    }

    async fn wait_for_admission(&self, candidate: &Candidate) -> Result<Peer, NotAdmitted> {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        let mut ztunnels = self.hub.ztunnels();
        loop {
            let known = ztunnels.borrow_and_update().clone();
            match self.policy.admit(candidate, known.as_ref()) {
                Err(refusal) if refusal.may_come => {
                    if timeout_at(deadline, ztunnels.changed()).await.is_err() {
                        return Err(refusal);
                    }
                }
                result => return result,
            }
        }
    }

    fn refuse(&self, refusal: &NotAdmitted) {
        self.hub.metrics().refused();
        if let Some(suppressed) = inpod_service::throttle_log(&refusal.origin) {
            let error = &refusal.why;
            tracing::warn!(target: "audit", error, suppressed, "Refused a connection to ZDS");
        }
    }
}

/// The origins of connections, limited in total and per origin.
#[derive(Clone, Debug, Default)]
struct Places(Arc<Mutex<Vec<String>>>);

impl Places {
    fn take(&self, origin: &str, (max, max_same): (usize, usize)) -> Result<Place, NotAdmitted> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = taken.iter().filter(|it| *it == origin).count();
        if taken.len() >= max || same >= max_same {
            let why = format!("{origin}: too many connections");
            return Err(NotAdmitted::new(origin, why));
        }
        taken.push(origin.to_owned());
        Ok(Place {
            places: self.clone(),
            origin: origin.to_owned(),
        })
    }
}

/// A place that counts until dropped.
#[derive(Debug)]
struct Place {
    places: Places,
    origin: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = taken.iter().position(|it| *it == self.origin) {
            taken.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_origin_takes_all_places_and_a_dropped_place_is_free() {
        let places = Places::default();
        let take = |origin| places.take(origin, (3, 2)).ok();
        let storm: Vec<_> = (0..1000).filter_map(|_| take("storm")).collect();
        assert_eq!(storm.len(), 2);
        let ztunnel = take("ztunnel").unwrap();
        assert!(take("other").is_none(), "the total is limited");
        drop(ztunnel);
        assert!(take("other").is_some());
        drop(storm);
        assert!(places.0.lock().unwrap().is_empty());
    }
}
