//! Removes inpod from the node in steps that may be interrupted and repeated.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_service::uninstall::{self, Marker, UninstallMode};

use crate::{
    ISTIO_CNI,
    error::ChainError,
    files,
    plan::Restore,
    reconcile::{Installer, step_names},
    record::Record,
};

/// The time that pod-events has to withdraw all pods.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(300);

/// The number of attempts to leave the chain, because the owner of a file may write at the same time.
const MAX_ATTEMPTS: usize = 10;

/// Reads the request to leave the node. For an unreadable or invalid file it returns `None`, so that inpod stays.
pub(crate) fn read_leave_request(file: &Path, marker: &Marker) -> Option<UninstallMode> {
    uninstall::read(file, marker).unwrap_or_else(|error| {
        tracing::error!(error, "Cannot read whether to leave the node; staying");
        None
    })
}

/// Leaves the chain; removes the plugin once no call can be in progress; and removes the state once no pod needs it.
/// Returns what was done.
pub(crate) async fn leave_node(
    mut installer: Installer,
    how: UninstallMode,
) -> anyhow::Result<String> {
    tracing::warn!(%how, "Leaving the node");
    let mut steps = vec![leave_chain(&mut installer, how).await?];
    steps.push(remove_plugin(&mut installer, how).await?);
    if how == UninstallMode::Uninstall {
        steps.extend(wait_withdrawn(&installer).await);
    }
    steps.push(remove_state(&installer)?);
    Ok(steps.join(", "))
}

pub(crate) fn write_receipt(
    file: &Path,
    marker: &Marker,
    how: UninstallMode,
    done: &str,
) -> anyhow::Result<()> {
    tracing::warn!(%how, done, "Left the node");
    uninstall::write_receipt(file, how, done)
        .with_context(|| format!("cannot write {}", file.display()))?;
    marker
        .set(how)
        .context("cannot set the marker of a node that inpod has left")
}

async fn leave_chain(installer: &mut Installer, how: UninstallMode) -> anyhow::Result<String> {
    let restore = match how {
        // Without its plugin, istio-cni's entry would keep even istio-cni's own pod from starting.
        _ if !installer.has_istio_cni() => Restore::ExceptIstioCni,
        UninstallMode::Handover => Restore::WithIstioCni,
        UninstallMode::Uninstall => Restore::Everything,
    };
    let mut left = installer.leave_chain(restore);
    for _ in 1..MAX_ATTEMPTS {
        if let Err(ChainError::Raced(_)) = left {
            tokio::time::sleep(Duration::from_millis(50)).await;
            left = installer.leave_chain(restore);
        }
    }
    let steps = left.context("cannot leave the chain")?;
    Ok(if steps.is_empty() {
        "inpod was not in the chain".to_owned()
    } else {
        format!("removed from the chain ({})", step_names(&steps))
    })
}

async fn remove_plugin(installer: &mut Installer, how: UninstallMode) -> anyhow::Result<String> {
    for dir in installer.plugin_dirs() {
        files::remove_temporaries(&dir)
            .with_context(|| format!("cannot clean up {}", dir.display()))?;
    }
    let record = &installer.record;
    let paths = record.binary.iter().chain(&record.earlier_binaries);
    let paths: Vec<_> = paths.cloned().collect();
    if paths.is_empty() {
        return Ok("no plugin to remove".to_owned());
    }
    if installer.config.keep_binary {
        return Ok(format!("plugin kept in {}", paths.join(", ")));
    }
    tokio::time::sleep(installer.config.binary_grace()).await;
    // Another component may have restored the entry since, and without its plugin the entry fails every pod.
    leave_chain(installer, how).await?;
    for path in paths {
        let path = installer.at(Path::new(&path));
        let removed = inpod_service::remove_if_exists(&path);
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    installer.update_record(|record| {
        record.binary = None;
        record.earlier_binaries.clear();
    })?;
    Ok("plugin removed".to_owned())
}

/// Waits until no namespace is enrolled; returns a note if some still are at the timeout.
async fn wait_withdrawn(installer: &Installer) -> Option<String> {
    let config = &installer.config;
    let dir = config.on_host(&config.plugin_state_dir);
    let deadline = Instant::now() + WITHDRAW_TIMEOUT;
    loop {
        let enrolled = match EnrolledNamespaces::read(&dir) {
            Ok(None) => return None,
            Ok(Some(list)) if list.names().is_empty() => return None,
            Ok(Some(list)) => format!("{} namespaces are still enrolled", list.names().len()),
            Err(error) => format!("cannot read which namespaces are enrolled: {error}"),
        };
        if Instant::now() >= deadline {
            return Some(format!("{enrolled} after {} s", WITHDRAW_TIMEOUT.as_secs()));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Empties the state directories, but keeps the directories themselves, which may be mounts.
fn remove_state(installer: &Installer) -> anyhow::Result<String> {
    let config = &installer.config;
    let plugins = config.on_host(&config.plugin_state_dir);
    inpod_service::uds::clear_directory(&plugins)
        .with_context(|| format!("cannot empty {}", plugins.display()))?;
    drop(fs::remove_dir(&plugins));
    let dir = config.record_dir();
    Record::remove(&dir)?;
    inpod_service::remove_if_exists(&dir.join("lock"))
        .with_context(|| format!("cannot empty {}", dir.display()))?;
    // A failed removal is ignored: other programs may keep files in the directory, or the directory is a mount.
    drop(fs::remove_dir(&dir));
    Ok("state removed".to_owned())
}

impl Installer {
    pub(crate) fn has_istio_cni(&self) -> bool {
        self.plugin_dirs().any(|dir| dir.join(ISTIO_CNI).exists())
    }

    fn plugin_dirs(&self) -> impl Iterator<Item = PathBuf> {
        let dirs = &self.desired.runtime.bin_dirs;
        dirs.iter().map(|dir| self.at(dir))
    }
}
