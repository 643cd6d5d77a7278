//! Looks at every pod whenever something is news, and does what is to be done.

use std::{convert::Infallible, sync::Arc, time::Duration};

use kube::Client;
use tokio::time::{Instant, sleep};

use crate::{
    acts,
    config::Config,
    diagnosis::diagnose,
    enrollments::Enrollments,
    events::Events,
    ledger::{Change, Ledger, Step},
    limit::Bucket,
    metrics::Metrics,
    pods::{Pod, Pods},
};

/// How often it is looked at what may become due though nothing changes.
const TICK: Duration = Duration::from_secs(1);

/// Changes that come together are looked at together.
const COALESCE: Duration = Duration::from_millis(20);

/// Keeps the pods of a node redirected, as far as that is in its power.
pub(crate) struct Keeper {
    client: Client,
    config: Arc<Config>,
    metrics: Metrics,
    events: Events,
    pods: Pods,
    enrollments: Enrollments,
    ledger: Ledger,
}

impl Keeper {
    pub(crate) fn new(
        client: Client,
        config: Arc<Config>,
        metrics: Metrics,
        pods: Pods,
        enrollments: Enrollments,
    ) -> Self {
        let bucket = Bucket::per_minute(config.changes_per_minute());
        Self {
            events: Events::start(client.clone(), &config.node_name, metrics.clone()),
            ledger: Ledger::new(config.modes(), config.label(), bucket),
            client,
            config,
            metrics,
            pods,
            enrollments,
        }
    }

    /// Looks and acts, for ever.
    pub(crate) async fn run(mut self) -> Infallible {
        loop {
            self.round().await;
            let is_open = self.ledger.is_open();
            tokio::select! {
                () = self.pods.changed() => {}
                () = self.enrollments.changed() => {}
                () = sleep(TICK), if is_open => continue,
            }
            sleep(COALESCE).await;
        }
    }

    async fn round(&mut self) {
        let known = self.pods.now();
        self.ledger.keep(|uid| known.contains_key(uid));
        for pod in known.values() {
            let word = self.enrollments.of(&pod.pod.uid);
            let diagnosis = diagnose(pod.broken.as_ref(), &word);
            let steps = self.ledger.look(pod, &diagnosis, Instant::now());
            for step in steps {
                self.take(pod, step).await;
            }
        }
        self.metrics.amiss(self.ledger.amiss());
    }

    async fn take(&mut self, pod: &Pod, step: Step) {
        let Step::Change(change) = step else {
            self.tell(pod, &step);
            return;
        };
        let label = self.config.label();
        let answer = acts::change(&self.client, pod, change, &label).await;
        let what = match change {
            Change::Label => "label",
            Change::Unlabel => "take the label off",
            Change::Delete => "delete",
        };
        tracing::info!(pod = %pod.pod, uid = %pod.pod.uid, what, ?answer, "Asked for a change of a pod");
        let told = self.ledger.did(pod, change, &answer, Instant::now());
        told.iter().for_each(|step| self.tell(pod, step));
    }

    fn tell(&self, pod: &Pod, step: &Step) {
        match step {
            Step::Count(way, came) => self.metrics.count(*way, *came),
            Step::Tell(note) if note.is_warning => {
                tracing::warn!(pod = %pod.pod, reason = note.reason, "{}", note.text);
                self.events.tell(&pod.pod, note);
            }
            Step::Tell(note) => {
                tracing::info!(pod = %pod.pod, reason = note.reason, "{}", note.text);
                self.events.tell(&pod.pod, note);
            }
            Step::Change(_) => {}
        }
    }
}
