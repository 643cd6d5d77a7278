//! Replays the spool in the order of writing. A file is removed once the event's effect is in the checkpoint.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use inpod_cni::spool::{Entry, SCHEMA, SpooledVerb, now_unix_ms};
use inpod_service::{Trace, is_unusable, read_bounded_nofollow, remove_if_exists};
use inpod_types::SandboxRef;
use serde::Deserialize;
use tokio::time::Instant;

use crate::{
    boottime::BootInstant,
    checkpoint::MAX_STATE_BYTES,
    pod::PodKey,
    tasks::{AddCall, OfflineAdd, ReplayOutcome},
};

const UNREADABLE_SUFFIX: &str = ".unreadable";

/// The age at which an incomplete file no longer has a writer.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) enum Event {
    /// The runtime ended a sandbox.
    Ended(SandboxRef),
    /// A pod was admitted unenrolled.
    Admitted(PodKey, Box<OfflineAdd>),
}

impl Event {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Ended(_) => "ended",
            Self::Admitted(..) => "admitted",
        }
    }

    fn sandbox(&self) -> &SandboxRef {
        match self {
            Self::Ended(sandbox) => sandbox,
            Self::Admitted(_, admitted) => &admitted.call.sandbox,
        }
    }
}

pub(super) trait EventHandler: Send {
    fn handle(&mut self, event: Event) -> impl Future<Output = ReplayOutcome> + Send;
}

#[derive(Debug, thiserror::Error)]
enum SpoolError {
    #[error("it is from another boot")]
    OtherBoot,
    #[error("{0}")]
    Unreadable(String),
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for SpoolError {
    fn from(error: io::Error) -> Self {
        if is_unusable(&error) {
            return Self::Unreadable(error.to_string());
        }
        Self::Io(error)
    }
}

impl From<serde_json::Error> for SpoolError {
    fn from(error: serde_json::Error) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// Replays all events. A waiting event blocks only later events of the same sandbox. Continues after errors and returns
/// the last error.
pub(super) async fn replay(
    directory: &Path,
    boot_id: &str,
    handler: &mut impl EventHandler,
) -> Result<(), String> {
    let mut waiting = Waiting::new();
    let mut result = Ok(());
    for path in files(directory).map_err(|error| failed(directory, &error))? {
        let read = read_bounded_nofollow(&path, MAX_STATE_BYTES);
        let done = match read
            .map_err(SpoolError::from)
            .and_then(|bytes| parse(&bytes, boot_id))
        {
            Ok(event) => replay_event(&path, event, &mut waiting, handler).await,
            Err(why) => discard(&path, why),
        };
        if let Err(error) = done {
            result = Err(failed(&path, &error));
        }
    }
    result
}

/// The blocked sandboxes, each with the file of its admission if no other event of the sandbox waits.
type Waiting = BTreeMap<SandboxRef, Option<PathBuf>>;

async fn replay_event(
    path: &Path,
    event: Event,
    waiting: &mut Waiting,
    handler: &mut impl EventHandler,
) -> io::Result<()> {
    let (sandbox, event_name) = (event.sandbox().clone(), event.name());
    let is_end = matches!(event, Event::Ended(_));
    let admission = match waiting.get(&sandbox) {
        Some(Some(admission)) if is_end => Some(admission.clone()),
        Some(_) => return Ok(()),
        None => None,
    };
    match handler.handle(event).await {
        ReplayOutcome::Done => {
            tracing::info!(%sandbox, event = event_name, "Replayed a spooled event");
            waiting.remove(&sandbox);
            // An ended sandbox needs no admission. The end's file is removed last, because replaying only the end is
            // harmless.
            admission.map_or(Ok(()), |admission| remove_if_exists(&admission))?;
            remove_if_exists(path)
        }
        ReplayOutcome::Dropped(why) => {
            tracing::warn!(%sandbox, event = event_name, why, "Dropped a spooled event");
            remove_if_exists(path)
        }
        ReplayOutcome::Retry(why) => {
            tracing::debug!(%sandbox, event = event_name, why, "Not yet");
            waiting.insert(sandbox, (!is_end).then(|| path.to_owned()));
            Ok(())
        }
    }
}

fn discard(path: &Path, why: SpoolError) -> io::Result<()> {
    match why {
        SpoolError::OtherBoot => {
            tracing::info!(file = %path.display(), "Dropped a spooled event of another boot");
            remove_if_exists(path)
        }
        SpoolError::Unreadable(why) => {
            tracing::error!(file = %path.display(), why, "Set an unreadable spool file aside");
            let mut aside = path.as_os_str().to_owned();
            aside.push(UNREADABLE_SUFFIX);
            fs::rename(path, aside)
        }
        SpoolError::Io(error) => Err(error),
    }
}

/// Returns the files of a directory of the plugin, oldest first.
pub(super) fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    if directory.is_symlink() {
        // The plugin refuses to write through the symlink, so new events would be lost without a report.
        let problem = "it is a symlink; remove it";
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") {
            remove_abandoned(&entry)?;
        } else if !name
            .as_encoded_bytes()
            .ends_with(UNREADABLE_SUFFIX.as_bytes())
        {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Removes an incomplete file of a crashed plugin.
fn remove_abandoned(entry: &fs::DirEntry) -> io::Result<()> {
    // The writer may have renamed the file meanwhile.
    let Ok(written) = entry.metadata().and_then(|found| found.modified()) else {
        return Ok(());
    };
    let age = SystemTime::now().duration_since(written);
    let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
    if !is_dir && age.is_ok_and(|age| age > ABANDONED_AFTER) {
        return remove_if_exists(&entry.path());
    }
    Ok(())
}

fn failed(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

fn parse(bytes: &[u8], boot_id: &str) -> Result<Event, SpoolError> {
    let Schema { schema } = serde_json::from_slice(bytes)?;
    if schema != SCHEMA {
        let why = format!("schema {schema} is not supported; this release reads {SCHEMA}");
        return Err(SpoolError::Unreadable(why));
    }
    let entry: Entry = serde_json::from_slice(bytes)?;
    // With an empty boot ID, the plugin could not read the boot ID, so the event may be of this boot.
    if !entry.boot_id.is_empty() && entry.boot_id != boot_id {
        return Err(SpoolError::OtherBoot);
    }
    match entry.verb {
        SpooledVerb::Del => Ok(Event::Ended(entry.sandbox)),
        SpooledVerb::Add => admitted(entry),
    }
}

fn admitted(entry: Entry) -> Result<Event, SpoolError> {
    let lacks = |what: &str| SpoolError::Unreadable(format!("an ADD without {what}"));
    let pod = entry.pod.ok_or_else(|| lacks("pod"))?;
    let netns = entry.netns.ok_or_else(|| lacks("netns"))?;
    let age = Duration::from_millis(now_unix_ms().saturating_sub(entry.time_unix_ms));
    let (sandbox, addresses) = (entry.sandbox, entry.addresses);
    let (now, trace) = (Instant::now(), Trace::default());
    let call = AddCall::new(sandbox, pod.uid, netns, addresses, now, trace);
    let at = BootInstant::after_boot(BootInstant::now().since_boot().saturating_sub(age));
    Ok(Event::Admitted(
        (pod.namespace, pod.name),
        Box::new(OfflineAdd { call, at }),
    ))
}

#[cfg(test)]
mod tests;
