//! What the plugin and pod-events tell each other through the plugin's `stateDir` while one of them is away: the plugin
//! writes down what it could not tell, and reads which namespaces have pods in the mesh.

mod enrolled;
mod spool;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use inpod_cni::{
    enrolled::{ENROLLED_FILE, is_disabled},
    spool::{SPOOL_DIR, boot_id},
};
use inpod_service::{Leave, Readiness};
use inpod_types::NamespaceName;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::{
    metrics::Metrics,
    registry::Registry,
    source::{Inventory, PodKey},
    task::{ReplayOutcome, Shared},
};
use enrolled::Enrolled;
use spool::{Effects, Event};

/// How often the directory is looked through: a plugin whose call failed half-way writes while we run.
const PERIOD: Duration = Duration::from_secs(5);

/// The condition that tells whether the directory can be read and written.
const CONDITION: &str = "plugin-state";

/// Both sides of the directory, for ever.
#[derive(Debug)]
pub(crate) struct Away {
    state_dir: PathBuf,
    boot_id: String,
    shared: Arc<Shared>,
    registry: Registry,
    conditions: Readiness,
    metrics: Metrics,
    enrolled: Enrolled,
    /// What was last written down, and whether everything was known then; `None` where that failed.
    written: Option<(BTreeSet<NamespaceName>, bool)>,
    /// What was wrong the last time, which has been logged then.
    problem: Option<String>,
    /// Whether something that was read is to be told again.
    waits: bool,
}

impl Away {
    /// Reads what was written down while pod-events was away, and goes on reading. To be awaited before a verb is
    /// served, so that none overtakes an earlier one; waits for no other service.
    pub(crate) async fn start(
        shared: Arc<Shared>,
        registry: Registry,
        conditions: Readiness,
        metrics: Metrics,
    ) {
        let mut changes = shared.source.changes();
        changes.mark_unchanged();
        let mut away = Self {
            state_dir: shared.config.plugin_state_dir.clone(),
            boot_id: boot_id(),
            enrolled: Enrolled::new(&shared.config.policy()),
            written: None,
            shared,
            registry,
            conditions,
            metrics,
            problem: None,
            waits: false,
        };
        away.look(true).await;
        tokio::spawn(inpod_service::vital("away", away.follow(changes)));
    }

    async fn follow(mut self, mut changes: watch::Receiver<Arc<Inventory>>) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_due = tokio::select! {
                _ = ticks.tick() => true,
                Ok(()) = changes.changed() => false,
            };
            self.look(is_due).await;
        }
    }

    /// Looks at what has changed; where it is due, at everything.
    async fn look(&mut self, is_due: bool) {
        let read = if is_due || self.waits {
            self.read_spool().await
        } else {
            self.problem.clone().map_or(Ok(()), Err)
        };
        let written = self.write_enrolled(is_due).await;
        self.report(read.and(written));
    }

    async fn read_spool(&mut self) -> Result<(), String> {
        let mut late = Late {
            waits: false,
            registry: &self.registry,
            state_dir: &self.state_dir,
            metrics: &self.metrics,
            touched: BTreeSet::new(),
        };
        let directory = self.state_dir.join(SPOOL_DIR);
        let result = spool::settle(&directory, &self.boot_id, &mut late).await;
        self.waits = late.waits;
        let touched = late.touched;
        self.registry.wake_pods(&touched);
        result
    }

    /// The file is looked at where it is due, and where it is to say something else.
    async fn write_enrolled(&mut self, is_due: bool) -> Result<(), String> {
        let inventory = self.shared.source.inventory();
        let registry = &self.registry;
        self.enrolled
            .follow(&inventory, |namespace| registry.has_managed_pods(namespace));
        if is_due {
            self.enrolled.hold(registry.namespaces_with_managed_pods());
        }
        let complete = inventory.is_complete();
        let is_uninstalling = self.shared.leave_mode.is(Leave::Uninstall);
        let wanted = if is_uninstalling {
            self.enrolled.held().clone()
        } else {
            self.enrolled.wanted().clone()
        };
        if is_uninstalling && wanted.is_empty() && !self.state_dir.join(ENROLLED_FILE).exists() {
            // It has been cleared away with everything else.
            return Ok(());
        }
        let is_written =
            |(known, whole): &(BTreeSet<_>, bool)| *known == wanted && *whole == complete;
        if !is_due && self.written.as_ref().is_some_and(is_written) {
            return Ok(());
        }
        self.written = None;
        self.update(wanted.clone(), complete).await?;
        self.written = Some((wanted, complete));
        Ok(())
    }

    async fn update(&self, wanted: BTreeSet<NamespaceName>, complete: bool) -> Result<(), String> {
        let state_dir = self.state_dir.clone();
        // It waits for the disk.
        let update = move || enrolled::update(&state_dir, wanted, complete);
        let updated = tokio::task::spawn_blocking(update).await;
        let failed = |error: &dyn std::fmt::Display| {
            let directory = self.state_dir.display();
            format!("cannot keep the enrolled namespaces in {directory}: {error}")
        };
        match updated {
            Ok(result) => result.map_err(|error| failed(&error)),
            Err(error) => Err(failed(&error)),
        }
    }

    fn report(&mut self, result: Result<(), String>) {
        let problem = result.as_ref().err().cloned();
        if problem != self.problem
            && let Some(problem) = &problem
        {
            tracing::error!(problem, "The plugin's state directory is not usable");
        }
        self.problem = problem;
        self.conditions.set(CONDITION, result);
    }
}

/// What happened is told to the tasks.
struct Late<'a> {
    registry: &'a Registry,
    state_dir: &'a Path,
    metrics: &'a Metrics,
    touched: BTreeSet<PodKey>,
    /// Whether something has to be told again: what changes may settle it.
    waits: bool,
}

impl Effects for Late<'_> {
    async fn settle(&mut self, event: Event) -> ReplayOutcome {
        let name = event.name();
        let settled = if matches!(event, Event::Admitted(..)) && is_disabled(self.state_dir) {
            // What the kill switch let through stays outside as long as it is set. Nothing that the source shows
            // settles it, and a node may be left so for long.
            ReplayOutcome::Retry("inpod is disabled on this node".to_owned())
        } else {
            let settled = self.tell(event).await;
            self.waits |= matches!(settled, ReplayOutcome::Retry(_));
            settled
        };
        self.metrics.spooled(name, &settled);
        settled
    }
}

impl Late<'_> {
    async fn tell(&mut self, event: Event) -> ReplayOutcome {
        match event {
            Event::Ended(sandbox) => {
                let owner = self.registry.owner(&sandbox);
                let settled = self.registry.replay_delete(&sandbox).await;
                self.touched.extend(owner);
                settled
            }
            Event::Admitted(key, admitted) => {
                let settled = self.registry.replay_add(&key, *admitted).await;
                self.touched.insert(key);
                settled
            }
        }
    }
}

#[cfg(test)]
mod tests;
