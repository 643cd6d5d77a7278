//! The control loop, which reconciles every pod after each change and executes the resulting steps.

use std::{convert::Infallible, sync::Arc, time::Duration};

use futures_util::future::join_all;
use inpod_service::TokenBucket;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    actions,
    away::Away,
    config::Config,
    diagnosis::diagnose,
    enrollments::Enrollments,
    escalation::{Change, Escalation, Step},
    events::Events,
    metrics::Metrics,
    pods::{Pod, Pods},
};

/// The interval of reconciles without a change, while a case is open or pod-events is away.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// Changes within this time lead to a single reconcile.
const COALESCE_DELAY: Duration = Duration::from_millis(20);

pub(crate) struct Controller {
    client: Client,
    config: Arc<Config>,
    metrics: Metrics,
    events: Events,
    pods: watch::Receiver<Pods>,
    enrollments: watch::Receiver<Enrollments>,
    escalation: Escalation,
    away: Away,
}

impl Controller {
    pub(crate) fn new(
        client: Client,
        config: Arc<Config>,
        metrics: Metrics,
        pods: watch::Receiver<Pods>,
        enrollments: watch::Receiver<Enrollments>,
    ) -> Self {
        let per_minute = u32::from(config.changes_per_minute().get());
        let bucket = TokenBucket::new(per_minute, Duration::from_secs(60) / per_minute);
        Self {
            events: Events::start(client.clone(), &config.node_name, metrics.clone()),
            escalation: Escalation::new(config.modes(), config.label(), bucket),
            away: Away::new(config.unknown_after()),
            client,
            config,
            metrics,
            pods,
            enrollments,
        }
    }

    pub(crate) async fn run(mut self) -> Infallible {
        loop {
            self.reconcile().await;
            let is_waiting = self.escalation.has_open_cases() || self.away.is_counting();
            // Both senders live as long as the process: a panic of the tasks aborts the process.
            tokio::select! {
                Ok(()) = self.pods.changed() => {}
                Ok(()) = self.enrollments.changed() => {}
                () = sleep(TICK_INTERVAL), if is_waiting => continue,
            }
            sleep(COALESCE_DELAY).await;
        }
    }

    async fn reconcile(&mut self) {
        let known = self.pods.borrow().clone();
        self.escalation.retain(|uid| known.contains_key(uid));
        for pod in known.values() {
            let status = self.enrollments.borrow().get(&pod.pod.uid);
            let diagnosis = diagnose(pod.failed_init.as_ref(), &status);
            let steps = self.escalation.reconcile(pod, &diagnosis, Instant::now());
            for step in steps {
                self.execute(pod, step).await;
            }
        }
        self.metrics.unhealthy(self.escalation.unhealthy());
        self.mark_unknown(&known).await;
    }

    async fn mark_unknown(&mut self, known: &Pods) {
        let absence = self.enrollments.borrow().absence();
        let due = self.away.select(absence, known, Instant::now());
        let Some(absence) = absence else { return };
        let condition = absence.condition(&self.config.node_name, Timestamp::now());
        let requests = due
            .iter()
            .map(|pod| actions::set_condition(&self.client, pod, &condition));
        let answers = join_all(requests).await;
        for (pod, answer) in due.iter().zip(answers) {
            tracing::info!(pod = %pod.pod, uid = %pod.pod.uid, ?answer, "Requested the status Unknown for the condition of a pod");
            self.away.record_result(pod, &answer, Instant::now());
        }
    }

    async fn execute(&mut self, pod: &Pod, step: Step) {
        let Step::Change(change) = step else {
            self.report(pod, &step);
            return;
        };
        let label = self.config.label();
        let answer = actions::change(&self.client, pod, change, &label).await;
        let what = match change {
            Change::Label => "label",
            Change::Unlabel => "remove the label",
            Change::Delete => "delete",
        };
        tracing::info!(pod = %pod.pod, uid = %pod.pod.uid, what, ?answer, "Requested a change of a pod");
        let reports = self
            .escalation
            .record_result(pod, change, &answer, Instant::now());
        reports.iter().for_each(|step| self.report(pod, step));
    }

    fn report(&self, pod: &Pod, step: &Step) {
        match step {
            Step::Count(action, outcome) => self.metrics.count(*action, *outcome),
            Step::Report(note) if note.is_warning => {
                tracing::warn!(pod = %pod.pod, reason = note.reason, "{}", note.text);
                self.events.send(&pod.pod, note);
            }
            Step::Report(note) => {
                tracing::info!(pod = %pod.pod, reason = note.reason, "{}", note.text);
                self.events.send(&pod.pod, note);
            }
            Step::Change(_) => {}
        }
    }
}
