//! The protocol with the plugin while either side is unavailable, through files in the plugin's `stateDir`: the
//! plugin spools undelivered events, keeps the lines of its log, and reads which namespaces have pods in the mesh.

mod call_log;
mod enrolled;
mod spool;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use inpod_cni::{
    enrolled::{DISABLED_FILE, ENROLLED_FILE, is_disabled},
    spool::{SPOOL_DIR, boot_id},
};
use inpod_service::{Readiness, UninstallMode};
use inpod_types::{Backoff, NamespaceName};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, sleep},
};

use crate::{
    inventory::Inventory,
    metrics::Metrics,
    pod::PodKey,
    tasks::{Registry, ReplayOutcome, Shared},
};
use enrolled::EnrolledTracker;
use spool::{Event, EventHandler};

/// The interval of scans: a plugin whose call failed midway spools even while pod-events runs.
const SCAN_INTERVAL: Duration = Duration::from_secs(5);

/// The time between two lists. The time doubles while changes follow each other, so that a label on every namespace
/// writes few lists.
const CHANGE_PAUSE: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));

const CONDITION: &str = "plugin-state";

/// The condition that is not met while the plugin is disabled.
const KILL_SWITCH: &str = "kill-switch";

/// Replays the spool and maintains the list of enrolled namespaces.
#[derive(Debug)]
pub(crate) struct PluginState {
    state_dir: PathBuf,
    boot_id: String,
    shared: Arc<Shared>,
    registry: Registry,
    conditions: Readiness,
    metrics: Metrics,
    enrolled: EnrolledTracker,
    /// The last written list, and whether the inventory was complete then. `None` after a failed write.
    written: Option<(BTreeSet<NamespaceName>, bool)>,
    /// The last error, already logged.
    problem: Option<String>,
    needs_retry: bool,
}

impl PluginState {
    /// Replays the spool once, then continues in the background. The caller must await this function before serving CNI
    /// calls, so that no call overtakes a spooled event. The replay waits for no other service.
    pub(crate) async fn start(
        shared: Arc<Shared>,
        registry: Registry,
        conditions: Readiness,
        metrics: Metrics,
    ) {
        let mut changes = shared.source.changes();
        changes.mark_unchanged();
        let mut state = Self {
            state_dir: shared.config.plugin_state_dir.clone(),
            boot_id: boot_id(),
            enrolled: EnrolledTracker::new(&shared.config.policy()),
            written: None,
            shared,
            registry,
            conditions,
            metrics,
            problem: None,
            needs_retry: false,
        };
        state.sync(true).await;
        tokio::spawn(inpod_service::abort_on_panic("offline", state.run(changes)));
    }

    async fn run(mut self, mut changes: watch::Receiver<Arc<Inventory>>) {
        let mut pauses = 0;
        let mut ticks = interval(SCAN_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_due = tokio::select! {
                _ = ticks.tick() => true,
                Ok(()) = changes.changed() => false,
            };
            self.sync(is_due).await;
            if !is_due {
                sleep(CHANGE_PAUSE.delay(pauses)).await;
                let goes_on = changes.has_changed().unwrap_or(false);
                pauses = if goes_on { pauses + 1 } else { 0 };
            }
        }
    }

    /// Handles changes; if `is_due`, rescans everything.
    async fn sync(&mut self, is_due: bool) {
        let read = if is_due || self.needs_retry {
            self.read_spool().await
        } else {
            self.problem.clone().map_or(Ok(()), Err)
        };
        let logged = if is_due {
            self.report_kill_switch();
            call_log::forward(&self.state_dir)
        } else {
            Ok(())
        };
        let written = self.write_enrolled(is_due).await;
        self.report(read.and(written).and(logged));
    }

    fn report_kill_switch(&self) {
        let result = match self.shared.is_disabled() {
            false => Ok(()),
            true => Err(format!(
                "every new pod of this node starts outside the mesh: run `installer enable`, or remove {}",
                self.state_dir.join(DISABLED_FILE).display()
            )),
        };
        self.conditions.set(KILL_SWITCH, result);
    }

    async fn read_spool(&mut self) -> Result<(), String> {
        let mut replay = Replay {
            needs_retry: false,
            registry: &self.registry,
            state_dir: &self.state_dir,
            metrics: &self.metrics,
            touched: BTreeSet::new(),
        };
        let directory = self.state_dir.join(SPOOL_DIR);
        let result = spool::replay(&directory, &self.boot_id, &mut replay).await;
        self.needs_retry = replay.needs_retry;
        let touched = replay.touched;
        self.registry.wake(&touched);
        result
    }

    /// Writes the list of enrolled namespaces if the list changed; if `is_due`, compares the list with the file, too.
    async fn write_enrolled(&mut self, is_due: bool) -> Result<(), String> {
        let inventory = self.shared.source.inventory();
        let held = self.registry.namespaces_with_managed_pods();
        self.enrolled.update(&inventory, held);
        let complete = inventory.is_complete();
        let is_uninstalling = self.shared.leave_mode.is(UninstallMode::Uninstall);
        let wanted = if is_uninstalling {
            self.enrolled.held()
        } else {
            self.enrolled.wanted()
        };
        if is_uninstalling && wanted.is_empty() && !self.state_dir.join(ENROLLED_FILE).exists() {
            // The uninstall has removed the file.
            return Ok(());
        }
        let is_unchanged = |(known, was_complete): &(BTreeSet<_>, bool)| {
            known == wanted && *was_complete == complete
        };
        if !is_due && self.written.as_ref().is_some_and(is_unchanged) {
            return Ok(());
        }
        let wanted = wanted.clone();
        self.written = None;
        self.write(wanted.clone(), complete).await?;
        self.written = Some((wanted, complete));
        Ok(())
    }

    async fn write(&self, wanted: BTreeSet<NamespaceName>, complete: bool) -> Result<(), String> {
        let state_dir = self.state_dir.clone();
        let write = move || enrolled::write(&state_dir, wanted, complete);
        let outcome = tokio::task::spawn_blocking(write).await;
        let failed = |error: &dyn std::fmt::Display| {
            let directory = self.state_dir.display();
            format!("cannot write the list of enrolled namespaces in {directory}: {error}")
        };
        match outcome {
            Ok(result) => result.map_err(|error| failed(&error)),
            Err(error) => Err(failed(&error)),
        }
    }

    fn report(&mut self, result: Result<(), String>) {
        let problem = result.as_ref().err().cloned();
        if problem != self.problem
            && let Some(problem) = &problem
        {
            tracing::error!(problem, "Cannot use the plugin's state directory");
        }
        self.problem = problem;
        self.conditions.set(CONDITION, result);
    }
}

struct Replay<'a> {
    registry: &'a Registry,
    state_dir: &'a Path,
    metrics: &'a Metrics,
    touched: BTreeSet<PodKey>,
    /// Set if an event has to be replayed after a change that may settle the event.
    needs_retry: bool,
}

impl EventHandler for Replay<'_> {
    async fn handle(&mut self, event: Event) -> ReplayOutcome {
        let name = event.name();
        let settled = if matches!(event, Event::Admitted(..)) && is_disabled(self.state_dir) {
            // Pods admitted by the kill switch stay outside while the switch is set. No change of the source affects
            // the switch, so the event causes no retries.
            ReplayOutcome::Retry("inpod is disabled on this node".to_owned())
        } else {
            let settled = self.dispatch(event).await;
            self.needs_retry |= matches!(settled, ReplayOutcome::Retry(_));
            settled
        };
        self.metrics.spooled(name, &settled);
        settled
    }
}

impl Replay<'_> {
    async fn dispatch(&mut self, event: Event) -> ReplayOutcome {
        match event {
            Event::Ended(sandbox) => {
                let owner = self.registry.owner(&sandbox);
                let settled = self.registry.replay_delete(&sandbox).await;
                self.touched.extend(owner.map(Arc::unwrap_or_clone));
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
