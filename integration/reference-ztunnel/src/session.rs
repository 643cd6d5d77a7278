//! Serves one connection to the agent after the other, until SIGTERM or a protocol violation by the agent.

use std::fs::File;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use zds_client::{AckError, ProtocolError, ReadError, Received, RecvError};

use crate::access_log::AccessLog;
use crate::connection::Connection;
use crate::dial;
use crate::enter::Netns;
use crate::mesh::Mesh;
use crate::options::{Fault, Options};
use crate::pods::{Admission, Pods, Workload};
use crate::proxy::{Proxy, StartError};
use crate::state_file::{State, StateFile};

const RETRY: Duration = Duration::from_secs(5);

/// The period of the unasked answers of [`Fault::Keepalive`].
const KEEPALIVE_PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The access log or the signal handlers failed.
    #[error("failed to start: {0}")]
    Start(#[from] io::Error),
    /// The agent broke the protocol.
    #[error("ProtocolError({:?})", .0.to_string())]
    Protocol(#[from] ProtocolError),
    #[error("ended by --fault")]
    Fault,
}

/// Serves the pods of the agent until SIGTERM or SIGINT.
///
/// # Errors
///
/// After an error the process must exit with 1, like stock ztunnel.
pub async fn serve(options: Options) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut ztunnel = Ztunnel::new(options)?;
    let stopped = tokio::select! {
        error = ztunnel.sessions() => Err(error),
        () = either(&mut terminate, &mut interrupt) => Ok(()),
    };
    // After an error, live connections get no grace period.
    let grace = stopped
        .as_ref()
        .map_or(Duration::ZERO, |()| ztunnel.options.termination_deadline);
    ztunnel.drain(grace).await;
    stopped
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

struct Ztunnel {
    options: Options,
    log: AccessLog,
    mesh: Option<Arc<Mesh>>,
    state_file: StateFile,
    pods: Pods<Proxy>,
    connected: bool,
    retry_at: Option<Instant>,
    answers: usize,
    /// The refusal that, by a fault, follows the next answer.
    held_back: Option<String>,
}

enum End {
    Closed,
    Violation(ProtocolError),
    Fault,
}

impl Ztunnel {
    fn new(options: Options) -> io::Result<Self> {
        let mut ztunnel = Self {
            log: AccessLog::open(options.access_log.as_deref())?,
            mesh: options
                .ca
                .as_deref()
                .map(Mesh::open)
                .transpose()?
                .map(Arc::new),
            state_file: StateFile::new(options.status.clone()),
            pods: Pods::new(options.fault),
            connected: false,
            retry_at: None,
            answers: 0,
            held_back: None,
            options,
        };
        ztunnel.publish();
        Ok(ztunnel)
    }

    /// Connects to the agent again and again, until the agent breaks the protocol.
    async fn sessions(&mut self) -> ServeError {
        let fault = self.options.fault;
        if fault == Fault::Silent {
            return dial::connect_silently(&self.options.uds).await;
        }
        loop {
            let Some(mut connection) = self.connect().await else {
                return ServeError::Fault;
            };
            tracing::info!("connected to the agent");
            self.reconnected();
            let end = self.session(&mut connection).await;
            if fault == Fault::NoReconnect {
                pending::<()>().await;
            }
            drop(connection);
            tracing::info!("disconnected from the agent");
            self.connected = false;
            if fault == Fault::DisconnectStopsPods {
                stop(self.pods.take()).await;
            }
            self.publish();
            match end {
                End::Closed => {}
                End::Violation(violation) => return violation.into(),
                End::Fault => return ServeError::Fault,
            }
        }
    }

    /// Returns `None` if a fault gives up.
    async fn connect(&mut self) -> Option<Connection> {
        let (path, fault) = (self.options.uds.clone(), self.options.fault);
        if fault == Fault::GivesUpEarly {
            return Connection::open(&path, fault).await.ok();
        }
        if fault == Fault::StopsPodsLater {
            let connecting = dial::connect(&path, fault);
            if let Ok(connection) = timeout(Duration::from_secs(5), connecting).await {
                return Some(connection);
            }
            stop(self.pods.take()).await;
        }
        Some(dial::connect(&path, fault).await)
    }

    fn reconnected(&mut self) {
        self.connected = true;
        self.pods.reconnected();
        self.retry_at = None;
        self.held_back = None;
        self.publish();
    }

    async fn session(&mut self, connection: &mut Connection) -> End {
        let fault = self.options.fault;
        let tolerated_silence = if fault == Fault::Impatient {
            Some(Duration::from_secs(1))
        } else {
            (fault == Fault::GivesUpOnSilence).then_some(Duration::from_secs(8))
        };
        let mut last_request = Instant::now();
        loop {
            let keepalive = Instant::now() + KEEPALIVE_PERIOD;
            let outcome = tokio::select! {
                received = connection.recv(fault) => {
                    last_request = Instant::now();
                    self.answer(connection, received).await
                }
                () = due(self.retry_at) => self.retry().await,
                () = due(tolerated_silence.map(|silence| last_request + silence)) => Some(End::Closed),
                () = sleep_until(keepalive), if fault == Fault::Keepalive => {
                    connection.send_unasked_ack().await;
                    None
                }
            };
            if let Some(end) = outcome {
                return end;
            }
        }
    }

    /// Answers a request; the request or the answer may end the connection.
    async fn answer(
        &mut self,
        connection: &mut Connection,
        received: Result<Option<Received>, RecvError>,
    ) -> Option<End> {
        let fault = self.options.fault;
        let (outcome, end) = match received {
            Ok(None) => return Some(End::Closed),
            // The fault drops the request and its descriptor without an answer.
            Ok(Some(_)) if fault == Fault::NeverAck => return None,
            Ok(Some(Received::Add { .. }))
                if fault == Fault::PendingBlocks && self.pods.has_pending() =>
            {
                return None;
            }
            Ok(Some(Received::Del { uid }))
                if fault == Fault::ExitOnUnknownDel && !self.pods.knows(&uid) =>
            {
                return Some(End::Fault);
            }
            Ok(Some(request)) => {
                let outcome = self.carry_out(request).await;
                let is_over = outcome.is_err() && fault == Fault::NackCloses;
                (outcome, is_over.then_some(End::Closed))
            }
            Err(error) if is_accepted(&error, fault) => (Ok(()), None),
            Err(RecvError::Read(_)) if fault == Fault::SilentReadError => return Some(End::Closed),
            Err(error) => {
                self.misbehave_after(&error).await;
                (Err(error.to_string()), Some(end_of(&error, fault)))
            }
        };
        if let Err(error) = &outcome {
            tracing::warn!(%error, "request failed");
        }
        if let Fault::AckDelay(delay) = self.options.fault {
            sleep(delay).await;
        }
        match self.send(connection, outcome).await {
            Ok(()) => end,
            // A violation counts even if the agent does not wait for the answer.
            Err(_) => end.or(Some(End::Closed)),
        }
    }

    async fn misbehave_after(&mut self, error: &RecvError) {
        match (self.options.fault, error) {
            (Fault::ReadErrorStopsPods, RecvError::Read(_)) => stop(self.pods.take()).await,
            (Fault::LeakRefusedFd, _) => std::mem::forget(File::open("/dev/null")),
            _ => {}
        }
    }

    async fn send(
        &mut self,
        connection: &mut Connection,
        outcome: Result<(), String>,
    ) -> Result<(), AckError> {
        self.answers = self.answers.saturating_add(1);
        match (self.options.fault, outcome) {
            (Fault::SwallowOneAck, _) if self.answers == 5 => return Ok(()),
            (Fault::AcksOutOfOrder, Err(error)) => {
                self.held_back = Some(error);
                return Ok(());
            }
            (_, outcome) => {
                connection
                    .ack(outcome.as_ref().copied().map_err(String::as_str))
                    .await?;
            }
        }
        if self.options.fault == Fault::AckTwice {
            connection.send_unasked_ack().await;
        }
        match self.held_back.take() {
            Some(error) => connection.ack(Err(&error)).await,
            None => Ok(()),
        }
    }

    async fn carry_out(&mut self, request: Received) -> Result<(), String> {
        tracing::debug!(?request, "received");
        let outcome = match request {
            Received::Add { uid, info, netns } => {
                if self.options.fault == Fault::LeakFd {
                    std::mem::forget(netns.try_clone());
                }
                match Netns::new(netns) {
                    Ok(netns) => self.add(Workload { uid, info, netns }).await,
                    Err(error) => Err(StartError::Enter(error)),
                }
            }
            Received::Keep { uid } => {
                self.pods.keep(&uid);
                Ok(())
            }
            Received::Del { uid } => {
                let proxy = self.pods.del(&uid);
                self.end(proxy).await;
                Ok(())
            }
            Received::SnapshotSent => {
                stop(self.pods.complete_snapshot()).await;
                Ok(())
            }
        };
        if self.options.fault == Fault::StopBeforeSnapshotSent && !self.pods.snapshot_complete() {
            stop(self.pods.take_unnamed()).await;
        }
        self.plan_retry();
        // The file is written before the answer, so that the agent finds it up to date.
        self.publish();
        outcome.map_err(|error| format!("failure to start proxy : {error}"))
    }

    async fn add(&mut self, workload: Workload) -> Result<(), StartError> {
        match self.pods.add(&workload) {
            Admission::Running => Ok(()),
            Admission::Start { replaced } => {
                self.end(replaced).await;
                if self.options.fault == Fault::AckBeforeListening {
                    self.pods.failed(workload);
                    return Ok(());
                }
                let started = self.start(workload).await;
                if self.options.fault == Fault::AckStartFailures {
                    return Ok(());
                }
                started
            }
        }
    }

    async fn end(&self, proxy: Option<Proxy>) {
        match proxy {
            Some(proxy) if self.options.fault == Fault::DelKeepsConnections => linger(proxy),
            proxy => stop(proxy).await,
        }
    }

    async fn start(&mut self, workload: Workload) -> Result<(), StartError> {
        match self.proxy(&workload).await {
            Ok(proxy) => {
                tracing::info!(uid = workload.uid, name = workload.info.name, "pod started");
                self.pods.started(workload, proxy);
                Ok(())
            }
            Err(error) => {
                self.pods.failed(workload);
                Err(error)
            }
        }
    }

    async fn proxy(&self, workload: &Workload) -> Result<Proxy, StartError> {
        if self.options.fault == Fault::NackAdds {
            return Err(StartError::Fault);
        }
        let (log, mesh) = (self.log.clone(), self.mesh.clone());
        Proxy::start(workload, log, mesh, &self.options).await
    }

    async fn retry(&mut self) -> Option<End> {
        for workload in self.pods.pending() {
            let uid = workload.uid.clone();
            if let Err(error) = self.start(workload).await {
                tracing::warn!(uid, %error, "pod is still pending");
            }
        }
        self.retry_at = None;
        self.plan_retry();
        self.publish();
        None
    }

    /// Sets a single timer for all pending pods, from the first to the last.
    fn plan_retry(&mut self) {
        self.retry_at = match (self.pods.has_pending(), self.retry_at) {
            (false, _) => None,
            (true, planned) => planned.or_else(|| Some(Instant::now() + RETRY)),
        };
    }

    /// Closes the listeners, waits for the connections, then cuts the remaining ones.
    async fn drain(&mut self, grace: Duration) {
        self.connected = false;
        let mut proxies = self.pods.take();
        self.publish();
        proxies.iter().for_each(Proxy::close);
        let finished = async {
            for proxy in &mut proxies {
                proxy.finished().await;
            }
        };
        if timeout(grace, finished).await.is_err() {
            tracing::warn!(?grace, "cutting the connections that are left");
        }
        stop(proxies).await;
    }

    fn publish(&mut self) {
        let snapshot_complete = self.pods.snapshot_complete();
        self.state_file.publish(State {
            connected: self.connected,
            ready: self.connected && snapshot_complete && !self.pods.has_pending(),
            snapshot_complete,
            pods: self.pods.states(),
        });
    }
}

/// Returns whether a fault acknowledges a wrong request.
const fn is_accepted(error: &RecvError, fault: Fault) -> bool {
    matches!(
        (error, fault),
        (
            RecvError::Read(ReadError::NoDescriptor),
            Fault::NoDescriptorAccepted
        ) | (
            RecvError::Protocol(ProtocolError::MissingWorkloadInfo),
            Fault::NoInfoAccepted
        ) | (
            RecvError::Protocol(ProtocolError::SecondSnapshot),
            Fault::SecondSnapshotAccepted
        ) | (
            RecvError::Protocol(ProtocolError::KeepAfterSnapshot),
            Fault::KeepAfterSnapshotAccepted
        )
    )
}

const fn end_of(error: &RecvError, fault: Fault) -> End {
    match error {
        RecvError::Read(_) if matches!(fault, Fault::ExitOnReadError) => End::Fault,
        RecvError::Read(_) => End::Closed,
        RecvError::Protocol(violation) => End::Violation(*violation),
    }
}

async fn stop(proxies: impl IntoIterator<Item = Proxy>) {
    for proxy in proxies {
        proxy.stop().await;
    }
}

/// Closes the listeners of a proxy, whose connections go on until they end by themselves.
fn linger(mut proxy: Proxy) {
    proxy.close();
    tokio::spawn(async move { proxy.finished().await });
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
