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
    let mut watcher = None;
    // Logged once instead of at every reconcile.
    let mut is_unwatched = false;
    loop {
        if let Some(how) = uninstall::read_leave_request(&installer.config.leave_file, &marker) {
            let result = uninstall::leave_node(installer, how).await?;
            return uninstall::write_receipt(&result, &marker);
        }
        marker
            .clear()
            .context("cannot clear the marker of a node that inpod has left")?;
        let conf = installer.at(&installer.desired.runtime.conf_dir);
        let bin = installer.at(&installer.bin);
        let watched = [conf.as_path(), bin.as_path()];
        if !watcher
            .as_ref()
            .is_some_and(|watcher: &Watcher| watcher.is_watching(&watched))
        {
            // Without a watch, only the periodic reconcile finds changes.
            let opened = Watcher::open(&watched);
            if let Err(error) = &opened
                && !std::mem::replace(&mut is_unwatched, true)
            {
                tracing::warn!(%error, "Cannot watch the CNI directories");
            }
            is_unwatched = opened.is_err();
            watcher = opened.ok();
        }
        if let Some(watcher) = &mut watcher {
            watcher.drain();
        }
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
        wait(
            watcher.as_mut(),
            delay,
            (&installer.config.leave_file, &marker),
        )
        .await;
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
async fn wait(
    mut watcher: Option<&mut Watcher>,
    delay: Duration,
    (leave_file, marker): (&Path, &Marker),
) {
    let until = tokio::time::Instant::now() + delay;
    loop {
        let tick = until.min(tokio::time::Instant::now() + LEAVE_POLL_INTERVAL);
        tokio::select! {
            () = wait_changed(watcher.as_deref_mut()) => {
                tokio::time::sleep(COALESCE_DELAY).await;
                return;
            }
            () = tokio::time::sleep_until(tick) => {}
        }
        if tokio::time::Instant::now() >= until
            || uninstall::read_leave_request(leave_file, marker).is_some()
        {
            return;
        }
    }
}

async fn wait_changed(watcher: Option<&mut Watcher>) {
    match watcher {
        Some(watcher) => watcher.changed().await,
        None => std::future::pending().await,
    }
}
