//! Admission of connections to the ZDS socket: decides which connections get a session or wait, and how fast.
//!
//! There are two rates. Peers are checked at a high rate, so that a ztunnel behind a backlog of impostors is soon
//! reached. The rate is still bounded, so that impostors that reconnect forever (a refused stock ztunnel does so 16,000
//! times per second) cost only a fraction of a core. Sessions start slowly, and only admitted peers count for the
//! second rate. Memory and descriptors are bounded in total and per process or cgroup, so that no peer displaces
//! another.

use std::{convert::Infallible, sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};

use inpod_service::abort_on_panic;
use inpod_types::with_causes;

use crate::{
    connection_limit::{ConnectionLimit, ConnectionPermit},
    hub::Hub,
    peer::{AdmissionError, Candidate, Peer, Policy},
    rate_limit::RateLimit,
    zds,
};

/// The rate of checks. In a debug build, where a check takes 0.3 ms, an endless storm costs a sixth of a core
/// (integration/tests/scenarios/alone/zds_storm.rs), and a backlog of [`LISTEN_BACKLOG`] is gone in two seconds.
const MAX_CHECKS_PER_SECOND: u32 = 500;

/// Connections queued by the kernel. A ztunnel that finds the queue full retries with growing delays of at most 15 s.
pub(crate) const LISTEN_BACKLOG: i32 = 1024;

const MAX_SESSIONS_PER_SECOND: u32 = 5;

/// The number of peers admitted at the same time, with or without a session. A node has one ztunnel, or two during an
/// upgrade.
const MAX_SESSIONS: usize = 16;

/// The limit of sessions per process. A ztunnel has a single connection, and the end of an earlier connection is
/// noticed at once.
const MAX_SESSIONS_PER_PROCESS: usize = 8;

/// The number of peers that may wait until pod-events reports them as ztunnels.
const MAX_WAITING: usize = 16;

const MAX_WAITING_PER_CGROUP: usize = 2;

/// The maximum wait of a peer. A refused ztunnel connects again.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(10);

const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Admission {
    hub: Arc<Hub>,
    policy: Policy,
    session_limit: Arc<ConnectionLimit<i32>>,
    waiting_limit: Arc<ConnectionLimit<String>>,
    session_rate: tokio::sync::Mutex<RateLimit>,
}

impl Admission {
    pub(crate) fn new(hub: Arc<Hub>, policy: Policy) -> Arc<Self> {
        Arc::new(Self {
            hub,
            policy,
            session_limit: ConnectionLimit::new(MAX_SESSIONS, MAX_SESSIONS_PER_PROCESS),
            waiting_limit: ConnectionLimit::new(MAX_WAITING, MAX_WAITING_PER_CGROUP),
            session_rate: tokio::sync::Mutex::new(RateLimit::new(MAX_SESSIONS_PER_SECOND)),
        })
    }

    /// Serves the socket. Dropping the future closes all connections.
    pub(crate) async fn serve(self: Arc<Self>, mut listener: UnixSeqpacketListener) -> Infallible {
        let mut connections = JoinSet::new();
        let mut check_rate = RateLimit::new(MAX_CHECKS_PER_SECOND);
        loop {
            check_rate.acquire().await;
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(socket) => Arc::clone(&self).dispatch(socket, &mut connections),
                    Err(error) => {
                        // Most likely, the process is out of file descriptors; some will be released.
                        tracing::error!(%error, "Cannot accept a ztunnel");
                        sleep(ACCEPT_RETRY_INTERVAL).await;
                    }
                },
                Some(_) = connections.join_next(), if !connections.is_empty() => check_rate.refund(),
            }
        }
    }

    /// Refuses a connection, or starts its task.
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
            // A panic may leave the state that all sessions share half changed, so the process aborts.
            Ok(Decision::Admit(admitted)) => {
                connections.spawn(abort_on_panic(
                    "session",
                    self.run_session(socket, admitted),
                ));
            }
            Ok(Decision::Wait(candidate, permit)) => {
                connections.spawn(abort_on_panic(
                    "session",
                    self.wait_and_run(socket, candidate, permit),
                ));
            }
            Err(error) => self.refuse(&error),
        }
    }

    fn admit(&self, peer: Peer) -> Result<Admitted, AdmissionError> {
        match self.session_limit.try_acquire(peer.pid) {
            Some(permit) => Ok(Admitted { peer, permit }),
            None => Err(AdmissionError::TooManyConnections {
                pid: peer.pid,
                cgroup: peer.cgroup,
            }),
        }
    }

    /// Waits until a peer is admitted, then runs its session.
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

    /// Runs a session when the rate limit allows it.
    async fn run_session(self: Arc<Self>, socket: UnixSeqpacket, admitted: Admitted) {
        let Admitted { peer, permit } = admitted;
        // Sessions start in the order in which their peers were admitted.
        self.session_rate.lock().await.acquire().await;
        zds::serve_session(socket, &self.hub, peer).await;
        drop(permit);
    }

    fn refuse(&self, error: &AdmissionError) {
        self.hub.metrics().refused();
        if let Some(suppressed) = inpod_service::throttle_log(&error.origin()) {
            let error = with_causes(error);
            tracing::warn!(target: "audit", error, suppressed, "Refused a connection to ZDS");
        }
    }
}

enum Decision {
    Admit(Admitted),
    Wait(Candidate, ConnectionPermit<String>),
}

#[derive(Debug)]
struct Admitted {
    peer: Peer,
    permit: ConnectionPermit<i32>,
}
