//! Reconciles after events in the CNI directories and periodically, until the node is to be left.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_service::{Daemon, UninstallMode, uninstall::Marker};

use crate::{
    SERVICE,
    config::Config,
    metrics::Metrics,
    reconcile::{COALESCE_DELAY, Installer},
    uninstall,
    watcher::Watcher,
};

/// The interval at which `leave_file` is read. Kubernetes takes about a minute to update a ConfigMap anyway.
const LEAVE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Reconciles until inpod has left the node.
///
/// # Errors
///
/// Fails if another installer runs, or if the record is unusable.
pub(crate) async fn run(config: Config, daemon: &Daemon, metrics: Metrics) -> anyhow::Result<()> {
    let marker = Marker::in_directory(&daemon.directory(SERVICE.name));
    wait_while_left(&config.leave_file, &marker, daemon).await;
    let mut installer = Installer::new(config, metrics)?;
    let mut watcher = Watcher::default();
    loop {
        if let Some(how) = uninstall::read_leave_request(&installer.config.leave_file, &marker) {
            let receipt = installer.config.receipt_file.clone();
            let done = uninstall::leave_node(installer, how).await?;
            return uninstall::write_receipt(&receipt, &marker, how, &done);
        }
        marker
            .clear()
            .context("cannot clear the marker of a node that inpod has left")?;
        let conf = installer.at(&installer.desired.runtime.conf_dir);
        let bin = installer.at(&installer.bin);
        watcher.watch([&conf, &bin]);
        let (returned, outcome) = tokio::task::spawn_blocking(move || {
            let outcome = installer.reconcile(Instant::now());
            (installer, outcome)
        })
        .await
        .context("a reconcile panicked")?;
        installer = returned;
        let sweep = installer.config.sweep();
        let delay = outcome.retry_after.unwrap_or(sweep).min(sweep);
        for (condition, result) in outcome.conditions {
            daemon.readiness().set(condition, result);
        }
        wait(&mut watcher, delay, &installer.config.leave_file, &marker).await;
    }
}

/// Waits without a change while inpod has left the node as requested.
async fn wait_while_left(leave_file: &Path, marker: &Marker, daemon: &Daemon) {
    let mut is_logged = false;
    while let Some(how) =
        uninstall::read_leave_request(leave_file, marker).filter(|how| marker.is_set(*how))
    {
        // The state holds the marker that keeps a restarted container from installing the plugin again. Kubernetes may
        // restart it until the pod is deleted, so the state is removed only when the process exits.
        daemon.remove_state_on_exit(how == UninstallMode::Uninstall);
        let why = format!("inpod has left this node as requested ({how})");
        if !std::mem::replace(&mut is_logged, true) {
            tracing::warn!("{why}");
        }
        for condition in ["binary", "chain"] {
            daemon.readiness().set(condition, Err(why.clone()));
        }
        tokio::time::sleep(LEAVE_POLL_INTERVAL).await;
    }
    daemon.remove_state_on_exit(false);
}

/// Waits for an event, for the next period, or for a request to leave the node.
async fn wait(watcher: &mut Watcher, delay: Duration, leave_file: &Path, marker: &Marker) {
    let until = tokio::time::Instant::now() + delay;
    loop {
        let tick = until.min(tokio::time::Instant::now() + LEAVE_POLL_INTERVAL);
        tokio::select! {
            () = watcher.changed() => return tokio::time::sleep(COALESCE_DELAY).await,
            () = tokio::time::sleep_until(tick) => {}
        }
        if tokio::time::Instant::now() >= until
            || uninstall::read_leave_request(leave_file, marker).is_some()
        {
            return;
        }
    }
}
