//! Leaving the node, step by step. Each step is repeatable, and a stop between two of them loses nothing.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_cni_config::ISTIO_CNI;
use inpod_service::leave::{self, Leave, Marker};

use crate::{error::ChainError, files, reconcile::Installer, record::Record, removal::Restore};

/// How long pod-events may take to withdraw every pod.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(300);

/// How often a file is tried whose owner writes it at the same moment.
const MAX_ATTEMPTS: usize = 10;

/// What was done, for the receipt.
#[derive(Debug)]
pub(crate) struct Left {
    how: Leave,
    steps: Vec<String>,
    receipt: PathBuf,
}

impl Left {
    /// The one line.
    pub(crate) fn line(&self) -> String {
        leave::line(self.how, &self.steps.join(", "))
    }
}

/// Whether inpod is to leave. What cannot be read, or is no such word, means stay.
pub(crate) fn requested_leave(file: &Path, marker: &Marker) -> Option<Leave> {
    leave::read(file, marker).unwrap_or_else(|error| {
        tracing::error!(error, "Staying");
        None
    })
}

/// Leaves the node: the chain first, the plugin when no call can be under way any more, its state when no pod needs it.
pub(crate) async fn leave_node(mut installer: Installer, how: Leave) -> anyhow::Result<Left> {
    tracing::warn!(%how, "Leaving the node");
    let mut steps = vec![leave_chain(&mut installer, how).await?];
    steps.push(remove_plugin(&mut installer).await?);
    if how == Leave::Uninstall {
        steps.extend(wait_withdrawn(&installer).await);
    }
    steps.push(remove_state(&installer)?);
    Ok(Left {
        how,
        steps,
        receipt: installer.config.receipt_file.clone(),
    })
}

/// Writes the receipt, and remembers that it is written.
pub(crate) fn write_receipt(left: &Left, marker: &Marker) -> anyhow::Result<()> {
    let done = left.steps.join(", ");
    tracing::warn!(how = %left.how, done, "Has left the node");
    let written = leave::receipt(&left.receipt, left.how, &done);
    written.with_context(|| format!("cannot write {}", left.receipt.display()))?;
    marker
        .set(left.how)
        .context("cannot remember that this node was left")
}

async fn leave_chain(installer: &mut Installer, how: Leave) -> anyhow::Result<String> {
    let restore = match how {
        // The incumbent's own pod is one of those that could not start.
        _ if !installer.has_istio_cni() => Restore::ExceptIstioCni,
        Leave::Handover => Restore::WithIstioCni,
        Leave::Uninstall => Restore::Everything,
    };
    let mut changed = Vec::new();
    for _ in 0..MAX_ATTEMPTS {
        match installer.leave_chain(restore) {
            Ok(steps) => {
                changed.extend(steps.into_iter().map(|step| step.name));
                break;
            }
            Err(ChainError::Raced(_)) => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => return Err(error).context("cannot leave the chain"),
        }
    }
    Ok(if changed.is_empty() {
        "the chain was left already".to_owned()
    } else {
        format!("out of the chain ({})", changed.join(", "))
    })
}

async fn remove_plugin(installer: &mut Installer) -> anyhow::Result<String> {
    let dir = installer.config.on_host(&installer.dirs.bin);
    files::remove_temporaries(&dir)
        .with_context(|| format!("cannot look through {}", dir.display()))?;
    let Some(path) = installer.record.binary.clone().map(PathBuf::from) else {
        return Ok("no plugin of ours to remove".to_owned());
    };
    if installer.config.keep_binary {
        return Ok(format!("the plugin stays in {}", path.display()));
    }
    tokio::time::sleep(installer.config.binary_grace()).await;
    let there = installer.config.on_host(&path);
    let removed = files::remove(&there);
    removed.with_context(|| format!("cannot remove {}", there.display()))?;
    installer.record.binary = None;
    installer.save()?;
    Ok("the plugin is removed".to_owned())
}

/// Waits until no namespace is enrolled; says so where that does not come.
async fn wait_withdrawn(installer: &Installer) -> Option<String> {
    let dir = installer
        .config
        .on_host(installer.config.plugin_state_dir());
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

/// Removes what is in the plugin's directory and the record. The directories themselves may be mounts.
fn remove_state(installer: &Installer) -> anyhow::Result<String> {
    let config = &installer.config;
    let plugins = config.on_host(config.plugin_state_dir());
    inpod_service::uds::empty(&plugins)
        .with_context(|| format!("cannot empty {}", plugins.display()))?;
    drop(fs::remove_dir(&plugins));
    let dir = config.record_dir();
    Record::remove(&dir)?;
    files::remove(&dir.join("lock")).with_context(|| format!("cannot empty {}", dir.display()))?;
    // Others may keep something there, and a mount cannot be removed from within.
    drop(fs::remove_dir(&dir));
    Ok("nothing of it is left".to_owned())
}

impl Installer {
    /// Whether the incumbent's plugin is still on the node.
    fn has_istio_cni(&self) -> bool {
        let dir = self.config.on_host(&self.dirs.bin);
        dir.join(ISTIO_CNI).exists()
    }
}
