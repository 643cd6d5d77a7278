//! Keeps netconfig and the broker told, whichever of them was restarted.
//!
//! A service that was restarted shows another instance_id on its stream. A restarted netconfig holds no claim: every
//! task claims again, and the broker is given the set once more when all are back. A restarted broker is given the set.
//!
//! The first set of a boot waits for the source without limit, and for a search of the pods that ran before us: what it
//! does not name, ztunnel drops.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use inpod_proto::{
    netconfig::v1::{WatchDriftResponse, watch_drift_response::Event as Drift},
    required,
    ztunnelbroker::v1::{
        SessionPhase, WatchSessionsResponse, watch_sessions_response::Event as Session,
    },
};
use inpod_service::Readiness;
use inpod_types::{Failure, Reason};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    adoption::Inheritance, clients::Clients, pipeline::Synced, registry::Registry, source::Health,
};

/// How long to wait before a stream that broke is opened again.
const REOPEN: Duration = Duration::from_millis(100);

/// The longest wait before a service is told again that could not be told.
const LONGEST: Duration = Duration::from_secs(5);

/// How long a service may take for one call of a synchronisation.
const TELL: Duration = Duration::from_secs(10);

/// The run of a service that is there; `None` while it is away.
pub(crate) type Instance = Option<Arc<str>>;

/// The condition that holds readiness up: whether an ADD of an enrolled pod could be served.
const IN_STEP: &str = "in-step";

/// Follows both services for ever.
#[derive(Debug)]
pub(crate) struct Sync {
    clients: Clients,
    registry: Registry,
    conditions: Readiness,
    synced: watch::Sender<Synced>,
    netconfig: watch::Receiver<Instance>,
    broker: watch::Receiver<Instance>,
    inheritance: Inheritance,
    source: watch::Receiver<Health>,
}

impl Sync {
    /// Opens both streams and keeps both services told. Returns which run of the broker is there.
    pub(crate) fn start(
        clients: Clients,
        registry: Registry,
        conditions: Readiness,
        synced: watch::Sender<Synced>,
        (inheritance, source): (Inheritance, watch::Receiver<Health>),
    ) -> watch::Receiver<Instance> {
        conditions.require(IN_STEP, "neither netconfig nor ztunnel-broker was seen yet");
        let (netconfig_run, netconfig) = watch::channel(None);
        let (broker_run, broker) = watch::channel(None);
        let (told, known) = (conditions.clone(), registry.clone());
        let follows = follow_netconfig(clients.clone(), known, told, netconfig_run);
        tokio::spawn(inpod_service::vital("netconfig", follows));
        let follows = follow_broker(clients.clone(), conditions.clone(), broker_run);
        tokio::spawn(inpod_service::vital("ztunnel-broker", follows));
        let sync = Self {
            clients,
            registry,
            conditions,
            synced,
            netconfig,
            broker: broker.clone(),
            inheritance,
            source,
        };
        tokio::spawn(inpod_service::vital("sync", sync.run()));
        broker
    }

    async fn run(mut self) {
        let mut wait = REOPEN;
        loop {
            let (netconfig, broker) = (
                self.netconfig.borrow_and_update().clone(),
                self.broker.borrow_and_update().clone(),
            );
            self.source.mark_unchanged();
            let told = self.tell(netconfig, broker).await;
            if let Err(failure) = &told {
                tracing::warn!(%failure, ?wait, "Could not tell everything; once more");
            }
            // Another run of a service is worth an attempt at once.
            let changed = tokio::select! {
                changed = self.netconfig.changed() => changed,
                changed = self.broker.changed() => changed,
                Ok(()) = self.source.changed(), if self.inheritance.is_open() => Ok(()),
                () = sleep(wait), if told.is_err() => Ok(()),
            };
            if changed.is_err() {
                return;
            }
            wait = told.map_or_else(|_| LONGEST.min(wait * 2), |()| REOPEN);
        }
    }

    async fn tell(&mut self, netconfig: Instance, broker: Instance) -> Result<(), Failure> {
        let mut known = self.synced.borrow().clone();
        if known.netconfig != netconfig {
            known = Synced::default();
            self.show(known.clone());
            if netconfig.is_none() {
                return Ok(());
            }
            self.registry.reclaim().await;
            self.release_strangers().await?;
            known.netconfig = netconfig;
            // Pods with a sidecar wait for nobody else.
            self.show(known.clone());
            self.registry.wake(|_| true);
            self.registry.discover_all();
        }
        let is_new = known.broker != broker;
        // A source that lists after the broker was told shows what the first set lacks.
        let is_late = broker.is_some() && self.inheritance.is_open() && self.is_listed();
        if known.netconfig.is_some() && (is_new || is_late) {
            if is_new {
                self.show(Synced {
                    broker: None,
                    ..known.clone()
                });
            }
            if broker.is_some() {
                self.inherit().await?;
            }
            self.seed(broker.as_deref()).await?;
            known.broker = broker;
        }
        self.show(known);
        self.registry.wake(|_| true);
        self.registry.discover_all();
        Ok(())
    }

    fn is_listed(&self) -> bool {
        matches!(&*self.source.borrow(), Some(Ok(())))
    }

    /// Once: pods that ran before us are written down, so that the first set names them.
    async fn inherit(&mut self) -> Result<(), Failure> {
        if self.inheritance.is_open() && self.is_listed() {
            self.registry.adopt().await?;
            self.inheritance.close()?;
            self.registry.enable_discovery();
        }
        if self.inheritance.is_unknown() {
            let message =
                "which pods ran before is not known until the source shows this node's pods";
            return Err(Failure::new(Reason::Starting, message));
        }
        Ok(())
    }

    /// Who is told everything is what ADDs wait for, and what readiness is.
    fn show(&self, known: Synced) {
        let lacks = |what: &str| Err(what.to_owned());
        let in_step = match (&known.netconfig, &known.broker) {
            (None, _) => lacks("netconfig is away, or does not hold every claim again yet"),
            (Some(_), None) => {
                lacks("ztunnel-broker is away, or was not given the desired set yet")
            }
            (Some(_), Some(_)) => Ok(()),
        };
        self.conditions.set(IN_STEP, in_step);
        self.synced.send_replace(known);
    }

    /// Claims that no checkpoint knows are of sandboxes that ended while their DEL could not be told.
    async fn release_strangers(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + TELL;
        let recorded: BTreeSet<_> = self
            .registry
            .records()
            .into_iter()
            .map(|record| record.sandbox)
            .collect();
        for sandbox in self.clients.list_claims(deadline).await? {
            if !recorded.contains(&sandbox) {
                tracing::warn!(%sandbox, "Releasing a claim that nobody remembers");
                self.clients.release(&sandbox, deadline).await?;
            }
        }
        Ok(())
    }

    async fn seed(&self, broker: Option<&str>) -> Result<(), Failure> {
        let Some(broker) = broker else { return Ok(()) };
        let (revision, workloads) = self.registry.workloads()?;
        let deadline = Instant::now() + TELL;
        let result = self
            .clients
            .set_workloads(broker, revision, &workloads, deadline)
            .await;
        let told = result.clone().map_err(|failure| failure.to_string());
        self.conditions.set("ztunnel-broker", told);
        result?;
        tracing::info!(
            workloads = workloads.len(),
            broker,
            "Told the broker the desired set"
        );
        Ok(())
    }
}

async fn follow_netconfig(
    clients: Clients,
    registry: Registry,
    conditions: Readiness,
    run: watch::Sender<Instance>,
) {
    loop {
        let ended = watch_netconfig(&clients, &registry, &conditions, &run).await;
        conditions.set("netconfig", Err(ended.to_string()));
        run.send_replace(None);
        sleep(REOPEN).await;
    }
}

async fn watch_netconfig(
    clients: &Clients,
    registry: &Registry,
    conditions: &Readiness,
    run: &watch::Sender<Instance>,
) -> Failure {
    let mut stream = match clients.watch_drift().await {
        Ok(stream) => stream,
        Err(failure) => return failure,
    };
    loop {
        match stream.message().await {
            Ok(Some(WatchDriftResponse { event: Some(event) })) => {
                on_drift(event, registry, conditions, run);
            }
            Ok(Some(WatchDriftResponse { event: None })) => {}
            Ok(None) => {
                return Failure::new(Reason::DependencyUnavailable, "netconfig ended its stream");
            }
            Err(status) => return inpod_proto::failure_of(&status),
        }
    }
}

fn on_drift(
    event: Drift,
    registry: &Registry,
    conditions: &Readiness,
    run: &watch::Sender<Instance>,
) {
    match event {
        Drift::InstanceId(instance) => {
            conditions.set("netconfig", Ok(()));
            run.send_replace(Some(instance.into()));
        }
        Drift::ClaimReleased(released) => {
            let named = (
                required("sandbox", released.sandbox),
                required("netns", released.netns),
            );
            if let (Ok(sandbox), Ok(netns)) = named {
                registry.netns_released(sandbox, netns);
            }
        }
        Drift::State(state) => {
            if let Ok(sandbox) = required("sandbox", state.sandbox) {
                registry.observed(&sandbox, &state.fingerprint, state.intact);
            }
        }
        Drift::StateComplete(_) => {}
    }
}

async fn follow_broker(clients: Clients, conditions: Readiness, run: watch::Sender<Instance>) {
    loop {
        let ended = watch_broker(&clients, &conditions, &run).await;
        conditions.set("ztunnel-broker", Err(ended.to_string()));
        conditions.set("ztunnel", Err("ztunnel-broker is away".to_owned()));
        run.send_replace(None);
        sleep(REOPEN).await;
    }
}

async fn watch_broker(
    clients: &Clients,
    conditions: &Readiness,
    run: &watch::Sender<Instance>,
) -> Failure {
    let mut stream = match clients.watch_sessions().await {
        Ok(stream) => stream,
        Err(failure) => return failure,
    };
    let mut live = BTreeSet::new();
    loop {
        match stream.message().await {
            Ok(Some(WatchSessionsResponse { event: Some(event) })) => {
                on_session(event, &mut live, conditions, run);
            }
            Ok(Some(WatchSessionsResponse { event: None })) => {}
            Ok(None) => {
                return Failure::new(
                    Reason::DependencyUnavailable,
                    "ztunnel-broker ended its stream",
                );
            }
            Err(status) => return inpod_proto::failure_of(&status),
        }
        let connected = if live.is_empty() {
            Err("no ztunnel is up to date".to_owned())
        } else {
            Ok(())
        };
        conditions.set("ztunnel", connected);
    }
}

fn on_session(
    event: Session,
    live: &mut BTreeSet<u64>,
    conditions: &Readiness,
    run: &watch::Sender<Instance>,
) {
    match event {
        Session::InstanceId(instance) => {
            conditions.set("ztunnel-broker", Ok(()));
            run.send_replace(Some(instance.into()));
        }
        Session::Session(session) => {
            live.remove(&session.session_id);
            if session.phase() == SessionPhase::Live {
                live.insert(session.session_id);
            }
        }
        Session::WorkloadState(_) | Session::StateComplete(_) => {}
    }
}
