//! Keeps netconfig and the broker in sync across their restarts.
//!
//! A restarted service announces another instance_id on its stream. A restarted netconfig holds no claims: every task
//! claims again, then the broker receives the desired set again. A restarted broker only receives the desired set.
//!
//! The first set of a boot waits, without limit, for the source and for the search of pods that ran before inpod,
//! because ztunnel drops every workload missing from the set.

use std::{collections::BTreeSet, time::Duration};

use inpod_proto::{
    netconfig::v1::{NodeRepaired, WatchDriftResponse, watch_drift_response::Event as DriftEvent},
    required,
    ztunnelbroker::v1::{
        SessionPhase, WatchSessionsResponse, watch_sessions_response::Event as SessionEvent,
    },
};
use inpod_service::Readiness;
use inpod_types::{Backoff, Failure, Reason, SandboxRef};
use prost_types::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tonic::Streaming;

use crate::{
    adoption::Adoption,
    clients::{Clients, Instance},
    inventory::Changes,
    source::Health,
    status::StatusReporter,
    tasks::{Registry, Synced},
    unserved::Announcements,
};

/// The delays of retries; a broken stream is reopened after the first.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// The interval of searches for claims without a record.
const ORPHAN_INTERVAL: Duration = Duration::from_secs(300);

const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The condition for readiness that ADDs of pods of the mesh can be served.
const SYNCED_CONDITION: &str = "in-step";

#[derive(Debug)]
pub(crate) struct Sync {
    clients: Clients,
    registry: Registry,
    conditions: Readiness,
    synced: watch::Sender<Synced>,
    netconfig: watch::Receiver<Instance>,
    broker: watch::Receiver<Instance>,
    adoption: Adoption,
    source: watch::Receiver<Health>,
    /// Claims that had no record at the last search.
    orphans: BTreeSet<SandboxRef>,
}

impl Sync {
    /// Opens both streams and synchronizes. Returns the broker's instance and announcements.
    pub(crate) fn start(
        clients: Clients,
        registry: Registry,
        status: StatusReporter,
        conditions: Readiness,
        synced: watch::Sender<Synced>,
        (adoption, source): (Adoption, watch::Receiver<Health>),
    ) -> (watch::Receiver<Instance>, watch::Receiver<Announcements>) {
        conditions.require(
            SYNCED_CONDITION,
            "not connected to netconfig and ztunnel-broker yet",
        );
        let (netconfig_instance, netconfig) = watch::channel(None);
        let (broker_instance, broker) = watch::channel(None);
        let (announced, announcements) = watch::channel(Announcements::default());
        let (readiness, known) = (conditions.clone(), (registry.clone(), status));
        let follower = follow_netconfig(clients.clone(), known, readiness, netconfig_instance);
        tokio::spawn(inpod_service::abort_on_panic("netconfig", follower));
        let follower = follow_broker(
            clients.clone(),
            conditions.clone(),
            broker_instance,
            announced,
        );
        tokio::spawn(inpod_service::abort_on_panic("ztunnel-broker", follower));
        let sync = Self {
            clients,
            registry,
            conditions,
            synced,
            netconfig,
            broker: broker.clone(),
            adoption,
            source,
            orphans: BTreeSet::new(),
        };
        tokio::spawn(inpod_service::abort_on_panic("sync", sync.run()));
        (broker, announcements)
    }

    async fn run(mut self) {
        let mut failures = 0;
        loop {
            let (netconfig, broker) = (
                self.netconfig.borrow_and_update().clone(),
                self.broker.borrow_and_update().clone(),
            );
            self.source.mark_unchanged();
            let synced = self.sync(netconfig, broker).await;
            let wait = RETRY.delay(failures);
            if let Err(failure) = &synced {
                tracing::warn!(%failure, ?wait, "Synchronization failed; retrying");
            }
            let changed = loop {
                // A new instance is synchronized at once.
                tokio::select! {
                    changed = self.netconfig.changed() => break changed,
                    changed = self.broker.changed() => break changed,
                    Ok(()) = self.source.changed(), if self.adoption.is_pending() => break Ok(()),
                    () = sleep(wait), if synced.is_err() => break Ok(()),
                    () = sleep(ORPHAN_INTERVAL), if synced.is_ok() => self.search_orphans().await,
                }
            };
            if changed.is_err() {
                return;
            }
            failures = if synced.is_ok() { 0 } else { failures + 1 };
        }
    }

    async fn sync(&mut self, netconfig: Instance, broker: Instance) -> Result<(), Failure> {
        let mut known = self.synced.borrow().clone();
        if known.netconfig != netconfig {
            known = Synced::default();
            self.publish(known.clone());
            if netconfig.is_none() {
                return Ok(());
            }
            self.registry.reclaim().await;
            let orphans = self.find_orphans().await?;
            self.release(&orphans).await;
            known.netconfig = netconfig;
            // Pods with a sidecar need no service but netconfig.
            self.publish(known.clone());
            self.registry.evaluate(&Changes::to_everything());
        }
        let is_new = known.broker != broker;
        // The source was listed only after the broker was synchronized, so pods of the source were missing from the
        // first set.
        let is_late = broker.is_some() && self.adoption.is_pending() && self.is_listed();
        if known.netconfig.is_some() {
            if is_new {
                self.publish(Synced {
                    broker: None,
                    ..known.clone()
                });
            }
            self.adopt(broker.is_some()).await?;
            if is_new || is_late {
                self.seed(broker.as_deref()).await?;
                known.broker = broker;
            }
        }
        self.publish(known);
        self.registry.evaluate(&Changes::to_everything());
        Ok(())
    }

    fn is_listed(&self) -> bool {
        matches!(&*self.source.borrow(), Some(Ok(())))
    }

    /// Records the pods from before inpod, once for the first set. Without a broker, as long as another agent serves
    /// ztunnel, the pods of that agent are recorded as well, because netconfig then takes over the exemption of their
    /// probes. They are searched again for the first set, which names later pods of that agent, too.
    async fn adopt(&mut self, has_broker: bool) -> Result<(), Failure> {
        if self.adoption.is_pending() && self.is_listed() {
            self.registry.adopt().await?;
            self.registry.enable_discovery();
            if has_broker {
                self.adoption.complete()?;
            }
        }
        if has_broker && self.adoption.is_first_of_boot() {
            let message = "the pods that ran before inpod are not known until the source lists this node's pods";
            return Err(Failure::new(Reason::Starting, message));
        }
        Ok(())
    }

    /// Publishes the synchronized services; ADDs and readiness wait for them.
    fn publish(&self, known: Synced) {
        let lacks = |what: &str| Err(what.to_owned());
        let in_sync = match (&known.netconfig, &known.broker) {
            (None, _) => lacks("netconfig is unavailable or does not hold every claim yet"),
            (Some(_), None) => {
                lacks("ztunnel-broker is unavailable or has not received the desired set yet")
            }
            (Some(_), Some(_)) => Ok(()),
        };
        self.conditions.set(SYNCED_CONDITION, in_sync);
        self.synced.send_replace(known);
    }

    /// Returns the claims that no record holds: the sandbox ended while its DEL could not be delivered, or the
    /// operation behind the claim was lost with its answer or in a crash.
    async fn find_orphans(&self) -> Result<BTreeSet<SandboxRef>, Failure> {
        let claims = self
            .clients
            .list_claims(Instant::now() + CALL_TIMEOUT)
            .await?;
        let records = self.registry.records();
        let holders = records.iter().filter(|record| !record.is_bare());
        let recorded: BTreeSet<_> = holders.map(|record| &record.sandbox).collect();
        let orphans = claims.into_iter().filter(|claim| !recorded.contains(claim));
        Ok(orphans.collect())
    }

    /// Releases claims. A claim that cannot be released is found again by a later search, and delays no ADD.
    async fn release(&self, orphans: &BTreeSet<SandboxRef>) {
        let deadline = Instant::now() + CALL_TIMEOUT;
        for sandbox in orphans {
            tracing::warn!(%sandbox, "Releasing a claim without a record");
            if let Err(failure) = self.clients.release(sandbox, deadline).await {
                tracing::warn!(%sandbox, %failure, "Cannot release it yet");
            }
        }
    }

    /// Releases claims without a record at both the last and the present search, because a search for a pod claims
    /// before it records.
    async fn search_orphans(&mut self) {
        let found = self.find_orphans().await.unwrap_or_default();
        let confirmed = found.intersection(&self.orphans).cloned().collect();
        self.release(&confirmed).await;
        self.orphans = found;
    }

    async fn seed(&self, broker: Option<&str>) -> Result<(), Failure> {
        let Some(broker) = broker else { return Ok(()) };
        let (revision, workloads) = self.registry.workloads()?;
        let deadline = Instant::now() + CALL_TIMEOUT;
        let result = self
            .clients
            .set_workloads(broker, revision, &workloads, deadline)
            .await;
        let outcome = result.clone().map_err(|failure| failure.to_string());
        self.conditions.set("ztunnel-broker", outcome);
        result?;
        tracing::info!(
            workloads = workloads.len(),
            broker,
            "Sent the desired set to ztunnel-broker"
        );
        Ok(())
    }
}

/// Passes on the events of a service's stream, which is opened again whenever the stream ends.
async fn follow<M, F>(
    service: &'static str,
    conditions: Readiness,
    instance: watch::Sender<Instance>,
    open: impl Fn() -> F,
    mut on_message: impl FnMut(M, &watch::Sender<Instance>),
    on_end: impl Fn(),
) where
    F: Future<Output = Result<Streaming<M>, Failure>>,
{
    loop {
        let ended = match open().await {
            Ok(mut stream) => loop {
                match stream.message().await {
                    Ok(Some(message)) => on_message(message, &instance),
                    Ok(None) => break format!("{service} ended its stream"),
                    Err(status) => break inpod_proto::failure_of(&status).to_string(),
                }
            },
            Err(failure) => failure.to_string(),
        };
        conditions.set(service, Err(ended));
        on_end();
        instance.send_replace(None);
        sleep(RETRY.first).await;
    }
}

async fn follow_netconfig(
    clients: Clients,
    (registry, status): (Registry, StatusReporter),
    conditions: Readiness,
    instance: watch::Sender<Instance>,
) {
    let open = || clients.watch_drift();
    let mut reported = None;
    let on_message =
        |message: WatchDriftResponse, instance: &watch::Sender<Instance>| match message.event {
            Some(DriftEvent::NodeRepaired(repaired)) => {
                if let Some(report) = report_of(&mut reported, repaired) {
                    status.node_event(Reason::NodeRepaired, &report);
                }
            }
            Some(event) => on_drift(event, &registry, &conditions, instance),
            None => {}
        };
    let known = conditions.clone();
    follow("netconfig", known, instance, open, on_message, || {}).await;
}

/// Returns the report of a repair, but none if a new stream repeats the last repair.
fn report_of(last: &mut Option<NodeRepaired>, repaired: NodeRepaired) -> Option<String> {
    if last.as_ref() == Some(&repaired) {
        return None;
    }
    // Seconds suffice to find the cause in the logs of the node.
    let at = repaired.at.map(|at| Timestamp { nanos: 0, ..at });
    let at = at.map(|at| format!("at {at}, ")).unwrap_or_default();
    let differences = repaired.differences.join("; ");
    *last = Some(repaired);
    Some(format!(
        "Another program changed what inpod keeps in the node's own network, and inpod repaired, {at}these differences: \
         {differences}"
    ))
}

fn on_drift(
    event: DriftEvent,
    registry: &Registry,
    conditions: &Readiness,
    instance: &watch::Sender<Instance>,
) {
    match event {
        DriftEvent::InstanceId(id) => {
            conditions.set("netconfig", Ok(()));
            instance.send_replace(Some(id.into()));
        }
        DriftEvent::ClaimReleased(released) => {
            let named = (
                required("sandbox", released.sandbox),
                required("netns", released.netns),
            );
            if let (Ok(sandbox), Ok(netns)) = named {
                registry.netns_released(sandbox, netns);
            }
        }
        DriftEvent::State(state) => {
            if let Ok(sandbox) = required("sandbox", state.sandbox) {
                registry.observed(&sandbox, &state.fingerprint, state.intact);
            }
        }
        DriftEvent::StateComplete(_) | DriftEvent::NodeRepaired(_) => {}
    }
}

/// Follows the broker's sessions, and passes on the events in `announced`.
async fn follow_broker(
    clients: Clients,
    conditions: Readiness,
    instance: watch::Sender<Instance>,
    announced: watch::Sender<Announcements>,
) {
    let mut live = BTreeSet::new();
    let open = || clients.watch_sessions();
    let on_message = |message: WatchSessionsResponse, instance: &watch::Sender<Instance>| {
        if let Some(event) = message.event {
            announced.send_modify(|announcements| announcements.count(&event));
            on_session(event, &mut live, &conditions, instance);
        }
        let connected = (!live.is_empty()).then_some(());
        let connected = connected.ok_or_else(|| "no ztunnel is up to date".to_owned());
        conditions.set("ztunnel", connected);
    };
    let on_end = || conditions.set("ztunnel", Err("ztunnel-broker is unavailable".to_owned()));
    let (service, known) = ("ztunnel-broker", conditions.clone());
    follow(service, known, instance, open, on_message, on_end).await;
}

fn on_session(
    event: SessionEvent,
    live: &mut BTreeSet<u64>,
    conditions: &Readiness,
    instance: &watch::Sender<Instance>,
) {
    #[expect(deprecated, reason = "the match covers every event")]
    match event {
        SessionEvent::InstanceId(id) => {
            // The instance begins a new stream, which names every session again.
            live.clear();
            conditions.set("ztunnel-broker", Ok(()));
            instance.send_replace(Some(id.into()));
        }
        SessionEvent::Session(session) => {
            live.remove(&session.session_id);
            if session.phase() == SessionPhase::Live {
                live.insert(session.session_id);
            }
        }
        SessionEvent::WorkloadState(_) | SessionEvent::StateComplete(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_that_a_new_stream_repeats_is_reported_once() {
        let repaired = |seconds| NodeRepaired {
            at: Some(Timestamp {
                seconds,
                nanos: 500,
            }),
            differences: ["a is missing", "b is missing"].map(str::to_owned).into(),
        };
        let mut last = None;
        assert_eq!(
            report_of(&mut last, repaired(1_764_410_400)).unwrap(),
            "Another program changed what inpod keeps in the node's own network, and inpod repaired, at \
             2025-11-29T10:00:00Z, these differences: a is missing; b is missing"
        );
        assert_eq!(report_of(&mut last, repaired(1_764_410_400)), None);
        assert!(report_of(&mut last, repaired(1_764_410_460)).is_some());
    }
}
