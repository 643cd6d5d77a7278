//! Serves one connection to the agent after the other, until SIGTERM or a protocol violation by the agent.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until};
use zds_client::{Client, ProtocolError, Received, RecvError};

use crate::access_log::AccessLog;
use crate::dial;
use crate::enter::Netns;
use crate::mesh::Mesh;
use crate::options::{Fault, Options};
use crate::pods::{Admission, Pods, Workload};
use crate::proxy::{Proxy, StartError};
use crate::state_file::{State, StateFile};

const RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The access log or the signal handlers failed.
    #[error("failed to start: {0}")]
    Start(#[from] io::Error),
    /// The agent broke the protocol.
    #[error("ProtocolError({:?})", .0.to_string())]
    Protocol(#[from] ProtocolError),
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
        violation = ztunnel.sessions() => Err(violation.into()),
        () = either(&mut terminate, &mut interrupt) => Ok(()),
    };
    // After a protocol error, live connections get no grace period.
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
}

enum End {
    Closed,
    Violation(ProtocolError),
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
            pods: Pods::new(),
            connected: false,
            retry_at: None,
            options,
        };
        ztunnel.publish();
        Ok(ztunnel)
    }

    /// Connects to the agent again and again, until the agent breaks the protocol.
    async fn sessions(&mut self) -> ProtocolError {
        if self.options.fault == Fault::Silent {
            return dial::connect_silently(&self.options.uds).await;
        }
        loop {
            let client = dial::connect(&self.options.uds).await;
            tracing::info!("connected to the agent");
            self.reconnected();
            let end = self.session(client).await;
            tracing::info!("disconnected from the agent");
            self.connected = false;
            if self.options.fault == Fault::DisconnectStopsPods {
                stop(self.pods.take()).await;
            }
            self.publish();
            if let End::Violation(violation) = end {
                return violation;
            }
        }
    }

    fn reconnected(&mut self) {
        self.connected = true;
        self.pods.reconnected();
        self.retry_at = None;
        self.publish();
    }

    async fn session(&mut self, mut client: Client) -> End {
        loop {
            let outcome = tokio::select! {
                received = client.recv() => self.answer(&mut client, received).await,
                () = due(self.retry_at) => self.retry().await,
            };
            if let Some(end) = outcome {
                return end;
            }
        }
    }

    /// Answers a request; the request or the answer may end the connection.
    async fn answer(
        &mut self,
        client: &mut Client,
        received: Result<Option<Received>, RecvError>,
    ) -> Option<End> {
        let (outcome, end) = match received {
            Ok(None) => return Some(End::Closed),
            // The fault drops the request and its descriptor without an answer.
            Ok(Some(_)) if self.options.fault == Fault::NeverAck => return None,
            Ok(Some(request)) => (self.carry_out(request).await, None),
            Err(error) => (Err(error.to_string()), Some(end_of(&error))),
        };
        if let Err(error) = &outcome {
            tracing::warn!(%error, "request failed");
        }
        if let Fault::AckDelay(delay) = self.options.fault {
            sleep(delay).await;
        }
        match client
            .ack(outcome.as_ref().copied().map_err(String::as_str))
            .await
        {
            Ok(()) => end,
            // A violation counts even if the agent does not wait for the answer.
            Err(_) => end.or(Some(End::Closed)),
        }
    }

    async fn carry_out(&mut self, request: Received) -> Result<(), String> {
        tracing::debug!(?request, "received");
        let outcome = match request {
            Received::Add { uid, info, netns } => match Netns::new(netns) {
                Ok(netns) => self.add(Workload { uid, info, netns }).await,
                Err(error) => Err(StartError::Enter(error)),
            },
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
                self.start(workload).await
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
        if tokio::time::timeout(grace, finished).await.is_err() {
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

fn end_of(error: &RecvError) -> End {
    match error {
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
