//! The spool, read in the order of its writing. A file goes when its effect is checkpointed.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use inpod_cni::spool::{Entry, SCHEMA, SpooledVerb, now_unix_ms};
use inpod_service::Trace;
use inpod_types::{InvalidIdentifier, SandboxRef};
use serde::Deserialize;
use tokio::time::Instant;

use crate::{
    boottime::BootInstant,
    metrics::Phases,
    source::PodKey,
    task::{AddCall, OfflineAdd, ReplayOutcome},
};

/// What is added to the name of a file that cannot be understood.
const ASIDE: &str = ".unreadable";

/// After this long a file that is still being written has no writer any more.
const ABANDONED: Duration = Duration::from_secs(600);

/// What was written down.
#[derive(Debug)]
pub(super) enum Event {
    /// A sandbox ended.
    Ended(SandboxRef),
    /// A pod was let through.
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

/// What events lead to.
pub(super) trait Effects: Send {
    /// Has an event take effect.
    fn settle(&mut self, event: Event) -> impl Future<Output = ReplayOutcome> + Send;
}

/// Why a file is no event.
#[derive(Debug, thiserror::Error)]
enum NoEvent {
    #[error("it is of another boot")]
    OtherBoot,
    #[error("{0}")]
    Unreadable(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<InvalidIdentifier> for NoEvent {
    fn from(error: InvalidIdentifier) -> Self {
        Self::Unreadable(error.to_string())
    }
}

impl From<serde_json::Error> for NoEvent {
    fn from(error: serde_json::Error) -> Self {
        Self::Unreadable(error.to_string())
    }
}

/// Settles what is in the spool, event by event. What must wait holds up the later events of its sandbox alone. Fails
/// with the last thing that went wrong, when all that could be done is done.
pub(super) async fn settle(
    directory: &Path,
    boot_id: &str,
    effects: &mut impl Effects,
) -> Result<(), String> {
    let mut waiting = Waiting::new();
    let mut result = Ok(());
    for path in files(directory).map_err(|error| failed(directory, &error))? {
        let done = match read(&path, boot_id) {
            Ok(event) => settle_one(&path, event, &mut waiting, effects).await,
            Err(why) => clear(&path, why),
        };
        if let Err(error) = done {
            result = Err(failed(&path, &error));
        }
    }
    result
}

/// The sandboxes that wait, each with the file of its admission if that is all that waits of it.
type Waiting = BTreeMap<SandboxRef, Option<PathBuf>>;

async fn settle_one(
    path: &Path,
    event: Event,
    waiting: &mut Waiting,
    effects: &mut impl Effects,
) -> io::Result<()> {
    let (sandbox, event_name) = (event.sandbox().clone(), event.name());
    let is_end = matches!(event, Event::Ended(_));
    let admission = match waiting.get(&sandbox) {
        Some(Some(admission)) if is_end => Some(admission.clone()),
        Some(_) => return Ok(()),
        None => None,
    };
    match effects.settle(event).await {
        ReplayOutcome::Done => {
            tracing::info!(%sandbox, event = event_name, "Made up for what was missed");
            waiting.remove(&sandbox);
            // What has ended needs no admission any more; its end alone would be harmless.
            admission.map_or(Ok(()), |admission| remove(&admission))?;
            remove(path)
        }
        ReplayOutcome::Dropped(why) => {
            tracing::warn!(%sandbox, event = event_name, why, "Dropped what was missed");
            remove(path)
        }
        ReplayOutcome::Retry(why) => {
            tracing::debug!(%sandbox, event = event_name, why, "Not yet");
            waiting.insert(sandbox, (!is_end).then(|| path.to_owned()));
            Ok(())
        }
    }
}

/// Clears away what is no event.
fn clear(path: &Path, why: NoEvent) -> io::Result<()> {
    match why {
        NoEvent::OtherBoot => {
            tracing::info!(file = %path.display(), "Dropped what was missed in another boot");
            remove(path)
        }
        NoEvent::Unreadable(why) => {
            tracing::error!(file = %path.display(), why, "Set an unreadable entry of the spool aside");
            let mut aside = path.as_os_str().to_owned();
            aside.push(ASIDE);
            fs::rename(path, aside)
        }
        NoEvent::Io(error) => Err(error),
    }
}

/// The entries, the earliest first. A directory that is not there has none.
fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
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
        } else if !name.as_encoded_bytes().ends_with(ASIDE.as_bytes()) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Removes what a plugin that died has left.
fn remove_abandoned(entry: &fs::DirEntry) -> io::Result<()> {
    // Put in place meanwhile, if it is not there.
    let Ok(written) = entry.metadata().and_then(|found| found.modified()) else {
        return Ok(());
    };
    let age = SystemTime::now().duration_since(written);
    if age.is_ok_and(|age| age > ABANDONED) {
        return remove(&entry.path());
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn failed(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn read(path: &Path, boot_id: &str) -> Result<Event, NoEvent> {
    if fs::symlink_metadata(path)?.is_file() {
        parse(&fs::read(path)?, boot_id)
    } else {
        Err(NoEvent::Unreadable("it is no file".to_owned()))
    }
}

#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

fn parse(bytes: &[u8], boot_id: &str) -> Result<Event, NoEvent> {
    let Schema { schema } = serde_json::from_slice(bytes)?;
    if schema != SCHEMA {
        let why = format!("its schema is {schema}, this release reads {SCHEMA}");
        return Err(NoEvent::Unreadable(why));
    }
    let entry: Entry = serde_json::from_slice(bytes)?;
    // Of a boot that could not be told it may be this one.
    if !entry.boot_id.is_empty() && entry.boot_id != boot_id {
        return Err(NoEvent::OtherBoot);
    }
    let sandbox = SandboxRef::try_from(&entry.sandbox)?;
    match entry.verb {
        SpooledVerb::Del => Ok(Event::Ended(sandbox)),
        SpooledVerb::Add => admitted(entry, sandbox),
    }
}

fn admitted(entry: Entry, sandbox: SandboxRef) -> Result<Event, NoEvent> {
    let lacks = |what: &str| NoEvent::Unreadable(format!("an ADD without its {what}"));
    let pod = entry.pod.ok_or_else(|| lacks("pod"))?;
    let netns = entry.netns.ok_or_else(|| lacks("netns"))?;
    let age = Duration::from_millis(now_unix_ms().saturating_sub(entry.time_unix_ms));
    let call = AddCall {
        sandbox,
        uid: pod.uid.as_deref().map(str::parse).transpose()?,
        netns: (&netns).into(),
        addresses: entry.addresses,
        deadline: Instant::now(),
        work_deadline: Instant::now(),
        trace: Trace::default(),
        phases: Phases::default(),
    };
    let at = BootInstant::after_boot(BootInstant::now().since_boot().saturating_sub(age));
    let key = (pod.namespace.parse()?, pod.name.parse()?);
    Ok(Event::Admitted(key, Box::new(OfflineAdd { call, at })))
}

#[cfg(test)]
mod tests;
