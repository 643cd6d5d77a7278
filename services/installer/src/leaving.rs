//! Leaving the node, step by step. Each step is repeatable, and a stop between two of them loses nothing.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use inpod_cni::enrolled::EnrolledNamespaces;
use inpod_cni_config::INCUMBENT;
use inpod_service::leave::{self, Leave, Marker};

use crate::{error::ChainError, files, leave::Return, reconcile::Installer, record::Record};

/// How long pod-events may take to withdraw every pod.
const WITHDRAW: Duration = Duration::from_secs(300);

/// How often a file is tried whose owner writes it at the same moment.
const ATTEMPTS: usize = 10;

/// What was done, for the receipt.
#[derive(Debug)]
pub(crate) struct Left {
    how: Leave,
    words: Vec<String>,
    receipt: PathBuf,
}

impl Left {
    /// The one line.
    pub(crate) fn line(&self) -> String {
        leave::line(self.how, &self.words.join(", "))
    }
}

/// Whether inpod is to leave. What cannot be read, or is no such word, means stay.
pub(crate) fn asked(file: &Path, marker: &Marker) -> Option<Leave> {
    leave::read(file, marker).unwrap_or_else(|error| {
        tracing::error!(error, "Staying");
        None
    })
}

/// Leaves the node: the chain first, the plugin when no call can be under way any more, its state when no pod needs it.
pub(crate) async fn leave(mut installer: Installer, how: Leave) -> anyhow::Result<Left> {
    tracing::warn!(%how, "Leaving the node");
    let mut words = vec![chain(&mut installer, how).await?];
    words.push(plugin(&mut installer).await?);
    if how == Leave::Uninstall {
        words.extend(withdrawn(&installer).await);
    }
    words.push(state(&installer)?);
    Ok(Left {
        how,
        words,
        receipt: installer.config.receipt_file.clone(),
    })
}

/// Writes the receipt, and remembers that it is written.
pub(crate) fn tell(left: &Left, marker: &Marker) -> anyhow::Result<()> {
    let done = left.words.join(", ");
    tracing::warn!(how = %left.how, done, "Has left the node");
    let written = leave::receipt(&left.receipt, left.how, &done);
    written.with_context(|| format!("cannot write {}", left.receipt.display()))?;
    marker
        .set(left.how)
        .context("cannot remember that this node was left")
}

async fn chain(installer: &mut Installer, how: Leave) -> anyhow::Result<String> {
    let back = match how {
        // The incumbent's own pod is one of those that could not start.
        _ if !installer.incumbent_is_there() => Return::NoIncumbent,
        Leave::Handover => Return::Incumbent,
        Leave::Uninstall => Return::Everything,
    };
    let mut changed = Vec::new();
    for _ in 0..ATTEMPTS {
        match installer.leave_chain(back) {
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

async fn plugin(installer: &mut Installer) -> anyhow::Result<String> {
    let dir = installer.config.on_host(&installer.places.bin);
    files::sweep(&dir).with_context(|| format!("cannot look through {}", dir.display()))?;
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
async fn withdrawn(installer: &Installer) -> Option<String> {
    let dir = installer
        .config
        .on_host(installer.config.plugin_state_dir());
    let deadline = Instant::now() + WITHDRAW;
    loop {
        let enrolled = match EnrolledNamespaces::read(&dir) {
            Ok(None) => return None,
            Ok(Some(list)) if list.names().is_empty() => return None,
            Ok(Some(list)) => format!("{} namespaces are still enrolled", list.names().len()),
            Err(error) => format!("cannot read which namespaces are enrolled: {error}"),
        };
        if Instant::now() >= deadline {
            return Some(format!("{enrolled} after {} s", WITHDRAW.as_secs()));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Removes what is in the plugin's directory and the record. The directories themselves may be mounts.
fn state(installer: &Installer) -> anyhow::Result<String> {
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
    fn incumbent_is_there(&self) -> bool {
        let dir = self.config.on_host(&self.places.bin);
        dir.join(INCUMBENT).exists()
    }
}
