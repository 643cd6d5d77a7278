//! What Kubernetes is told of pods: the annotation `ambient.istio.io/redirection`, and Events.
//!
//! Nothing here is waited for: what is told follows what is so. Start reading at `wish` for what a pod is to bear, at
//! `ledger` for what is sent when, and at `driver` for what sets it off.

mod driver;
mod events;
mod ledger;
mod limit;
pub(crate) mod metrics;
mod patch;
mod reports;
pub(crate) mod wish;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use inpod_service::Readiness;
use inpod_types::{NodeName, PodRef, Reason};
use kube::Client;
use prometheus_client::registry::Registry as Metrics;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{registry::Registry, source::Source, task::Shared};
use driver::Driver;
use events::{Letter, QUEUE};
use ledger::Ledger;
use limit::Limits;
use metrics::Counted;

/// What pod-events calls itself towards Kubernetes: as the reporter of Events and the manager of fields.
const REPORTER: &str = "inpod.io/pod-events";

/// Tells Kubernetes of pods. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Outputs(Option<Arc<Inner>>);

struct Inner {
    client: Client,
    source: Source,
    ledger: Mutex<Ledger>,
    limits: Mutex<Limits>,
    letters: mpsc::Sender<Letter>,
    counted: Counted,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

/// Whether an Event tells of something that goes its way, or of something to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Something happened as it should.
    Normal,
    /// Somebody should look.
    Warning,
}

impl Outputs {
    /// Tells nobody: pods come from a directory.
    pub fn silent() -> Self {
        Self(None)
    }

    /// Tells the API server that the pods come from; nobody where they come from a directory. What is sent is sent
    /// from now on, the annotations when it has been started.
    pub fn of(source: &Source, node: &NodeName) -> Self {
        source
            .client()
            .map_or_else(Self::silent, |client| Self::to(client, source, node))
    }

    fn to(client: Client, source: &Source, node: &NodeName) -> Self {
        let (letters, queue) = mpsc::channel(QUEUE);
        let counted = Counted::default();
        let events = events::send(client.clone(), node.clone(), queue, counted.clone());
        tokio::spawn(inpod_service::vital("events", events));
        Self(Some(Arc::new(Inner {
            client,
            source: source.clone(),
            ledger: Mutex::default(),
            limits: Mutex::default(),
            letters,
            counted,
        })))
    }

    /// How many pods do not bear the annotation that they should.
    pub(crate) fn unmet(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.ledger().unmet())
    }

    /// Declares what is counted here. Nothing is where nobody is told.
    pub(crate) fn register(&self, metrics: &mut Metrics) {
        let Some(inner) = &self.0 else { return };
        let unmet = Arc::clone(inner);
        inner
            .counted
            .register(metrics, move || unmet.ledger().unmet());
    }

    /// Has annotations and Events follow the pods. Pods without a sandbox are left as they are until those that ran
    /// before were taken over, which `taken_over` tells.
    pub(crate) fn start(
        &self,
        shared: &Arc<Shared>,
        registry: &Registry,
        conditions: &Readiness,
        taken_over: watch::Receiver<bool>,
    ) {
        let Some(inner) = &self.0 else { return };
        let driver = Driver::new(
            self.clone(),
            Arc::clone(inner),
            Arc::clone(shared),
            registry.clone(),
            conditions.clone(),
        );
        // Listens from now on: what changes before the driver has its first turn is not missed.
        let changes = shared.shown.changes();
        tokio::spawn(inpod_service::vital(
            "outputs",
            driver.run(changes, taken_over),
        ));
    }

    /// Whether peers are told that the pod is not redirected: the API server has accepted that, or the pod is gone.
    /// False while it is not known whether the server has accepted what was last sent. The pod's task is asked to look
    /// again when it becomes true; it must have shown that the pod leaves before it asks.
    pub fn has_withdrawn(&self, pod: &PodRef) -> bool {
        let Some(inner) = &self.0 else { return true };
        let inventory = inner.source.inventory();
        let key = (pod.namespace.clone(), pod.name.clone());
        // A static pod goes on when what shows it is made anew.
        let is_it =
            |shown: &&crate::pod::Pod| shown.is_called(&pod.uid) || shown.runtime_uid.is_some();
        match inventory.pod(&key).filter(is_it) {
            Some(shown) => {
                let redirection = shown.redirection.as_deref();
                inner
                    .ledger()
                    .has_withdrawn(&key, &shown.pod.uid, redirection, Instant::now())
            }
            None => inventory.is_complete() || inventory.pods.contains_key(&key),
        }
    }

    /// Tells people of something that happened to a pod. Never waits; what comes too often is left out.
    pub fn event(&self, pod: &PodRef, kind: Kind, reason: Reason, message: &str) {
        let Some(inner) = &self.0 else {
            tracing::debug!(%pod, ?kind, %reason, message, "No Event: pods do not come from Kubernetes");
            return;
        };
        tracing::debug!(%pod, ?kind, %reason, message, "Event");
        let letter = Letter {
            pod: pod.clone(),
            kind,
            reason,
            message: message.to_owned(),
            written: Instant::now(),
        };
        let is_allowed = inner
            .limits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .allow(&pod.uid, reason, Instant::now());
        if !is_allowed || inner.letters.try_send(letter).is_err() {
            inner.counted.event("dropped");
        }
    }
}

impl Inner {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
