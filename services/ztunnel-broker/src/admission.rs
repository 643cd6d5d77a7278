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
    connection_limit::{ConnectionLimit, ConnectionPermit},
    hub::Hub,
    log_throttle::LogThrottle,
    peer::{AdmissionError, Candidate, Peer, Policy},
    rate_limit::RateLimit,
    zds,
};

/// How many connections are looked at in a second. With a debug build, which takes 0.3 ms for a look, a storm without
/// end costs a sixth of a core (integration/tests/zds_storm.rs); a queue of [`BACKLOG`] is gone in two seconds.
const MAX_CHECKS_PER_SECOND: u32 = 500;

/// How many connections wait in the kernel to be looked at; a ztunnel that finds the queue full tries again later and
/// later (after 15 s at the latest).
pub(crate) const LISTEN_BACKLOG: i32 = 1024;

/// How many sessions begin in a second.
const MAX_SESSIONS_PER_SECOND: u32 = 5;

/// How many may be admitted at once, whether their session has begun or not. A node has one ztunnel, two during an
/// upgrade.
const MAX_SESSIONS: usize = 16;

/// How many of them may be of one process. A ztunnel has one connection; what it left behind is seen at once.
const MAX_SESSIONS_PER_PROCESS: usize = 8;

/// How many may wait for pod-events to say that they are ztunnels.
const MAX_WAITING: usize = 16;

/// How many of them may be of one cgroup.
const MAX_WAITING_PER_CGROUP: usize = 2;

/// How long they may. One that is sent away connects again.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait before the next try when no connection can be taken.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Who is let in, and who is there.
#[derive(Debug)]
pub(crate) struct Admission {
    hub: Arc<Hub>,
    policy: Policy,
    session_limit: Arc<ConnectionLimit<i32>>,
    waiting_limit: Arc<ConnectionLimit<String>>,
    session_rate: tokio::sync::Mutex<RateLimit>,
    refusal_log: Mutex<LogThrottle>,
}

impl Admission {
    pub(crate) fn new(hub: Arc<Hub>, policy: Policy) -> Arc<Self> {
        Arc::new(Self {
            hub,
            policy,
            session_limit: ConnectionLimit::new(MAX_SESSIONS, MAX_SESSIONS_PER_PROCESS),
            waiting_limit: ConnectionLimit::new(MAX_WAITING, MAX_WAITING_PER_CGROUP),
            session_rate: tokio::sync::Mutex::new(RateLimit::new(MAX_SESSIONS_PER_SECOND)),
            refusal_log: Mutex::default(),
        })
    }

    /// Serves whoever comes, for ever. When dropped, all connections close.
    pub(crate) async fn serve(self: Arc<Self>, mut listener: UnixSeqpacketListener) -> Infallible {
        let mut connections = JoinSet::new();
        let mut check_rate = RateLimit::new(MAX_CHECKS_PER_SECOND);
        loop {
            check_rate.acquire().await;
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(socket) => Arc::clone(&self).dispatch(socket, &mut connections),
                    Err(error) => {
                        // Out of descriptors, most likely: some will come back.
                        tracing::error!(%error, "Cannot accept a ztunnel");
                        sleep(ACCEPT_RETRY_INTERVAL).await;
                    }
                },
                Some(_) = connections.join_next(), if !connections.is_empty() => check_rate.refund(),
            }
        }
    }

    /// Sends a connection away, or has it taken care of.
    fn dispatch(self: Arc<Self>, socket: UnixSeqpacket, connections: &mut JoinSet<()>) {
        let decision = self.policy.identify(&socket).and_then(|candidate| {
            let ztunnels = self.hub.ztunnels();
            let result = self.policy.admit(&candidate, ztunnels.borrow().as_ref());
            match result {
                Ok(peer) => self.admit(peer).map(Decision::Admit),
                Err(error) if error.may_be_admitted_later() => {
                    let permit = self
                        .waiting_limit
                        .try_acquire(error.origin())
                        .ok_or(error)?;
                    Ok(Decision::Wait(candidate, permit))
                }
                Err(error) => Err(error),
            }
        });
        match decision {
            // One that panics may leave the ledger half changed, for all the others.
            Ok(Decision::Admit(admitted)) => {
                connections.spawn(vital("session", self.run_session(socket, admitted)));
            }
            Ok(Decision::Wait(candidate, permit)) => {
                connections.spawn(vital(
                    "session",
                    self.wait_and_run(socket, candidate, permit),
                ));
            }
            Err(error) => self.refuse(&error),
        }
    }

    /// A place for one who is admitted.
    fn admit(&self, peer: Peer) -> Result<Admitted, AdmissionError> {
        match self.session_limit.try_acquire(peer.pid) {
            Some(permit) => Ok(Admitted { peer, permit }),
            None => Err(AdmissionError::TooManyConnections {
                pid: peer.pid,
                cgroup: peer.cgroup,
            }),
        }
    }

    /// Keeps one waiting who may be said to be a ztunnel.
    async fn wait_and_run(
        self: Arc<Self>,
        socket: UnixSeqpacket,
        candidate: Candidate,
        permit: ConnectionPermit<String>,
    ) {
        tracing::debug!("Holding a connection to ZDS: it may be a ztunnel that was not named yet");
        let waited = self.wait_for_admission(&candidate).await;
        drop((candidate, permit));
        match waited.and_then(|peer| self.admit(peer)) {
            Ok(admitted) => self.run_session(socket, admitted).await,
            Err(error) => self.refuse(&error),
        }
    }

    async fn wait_for_admission(&self, candidate: &Candidate) -> Result<Peer, AdmissionError> {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        let mut ztunnels = self.hub.ztunnels();
        loop {
            let result = self
                .policy
                .admit(candidate, ztunnels.borrow_and_update().as_ref());
            match result {
                Err(error) if error.may_be_admitted_later() => {
                    match timeout_at(deadline, ztunnels.changed()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) | Err(_) => return Err(error),
                    }
                }
                result => return result,
            }
        }
    }

    /// A session, from its turn to its end.
    async fn run_session(self: Arc<Self>, socket: UnixSeqpacket, admitted: Admitted) {
        let Admitted { peer, permit } = admitted;
        // In the order in which they were admitted.
        self.session_rate.lock().await.acquire().await;
        zds::serve_session(socket, &self.hub, peer).await;
        drop(permit);
    }

    fn refuse(&self, error: &AdmissionError) {
        self.hub.metrics().refused();
        let mut refusal_log = self
            .refusal_log
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now().into_std();
        if let Some(suppressed) = refusal_log.record(&error.origin(), now) {
            let error = with_causes(error);
            tracing::warn!(target: "audit", error, suppressed, "Refused a connection to ZDS");
        }
    }
}

enum Decision {
    Admit(Admitted),
    Wait(Candidate, ConnectionPermit<String>),
}

/// One who is admitted, with a place.
#[derive(Debug)]
struct Admitted {
    peer: Peer,
    permit: ConnectionPermit<i32>,
}
