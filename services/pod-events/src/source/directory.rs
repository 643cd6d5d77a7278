//! Pods from a directory of manifests in the format of kubectl, to try inpod or run it without a cluster.
//!
//! An unusable file keeps its previous content, and a missing directory keeps the last inventory, so that a typing
//! error takes no pod out of the mesh.

mod manifest;

use std::{
    collections::BTreeMap,
    fs, io, iter, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventStream, Inotify, WatchMask};
use inpod_service::read_bounded_text;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Interval, MissedTickBehavior, interval},
};

use super::{Inventory, Scope, publish};
use manifest::{Manifest, ManifestError};

/// The interval of reading the directory without an event: another directory may have taken the path, or events may be
/// lost.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The limit of a file's size, enough for a list of a node's pods as kubectl writes it.
const MAX_MANIFEST_BYTES: u64 = 8 << 20;

#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("setting pods_from: cannot read directory {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("setting pods_from: cannot watch directory {}", .path.display())]
    Watch { path: PathBuf, source: io::Error },
}

/// The inventory, and a channel to request another read.
type WatchHandles = (
    watch::Receiver<Arc<Inventory>>,
    mpsc::Sender<oneshot::Sender<()>>,
);

type Events = EventStream<[u8; 4096]>;

/// Reads a directory again after every change, and every `check`.
pub(super) async fn watch(
    path: PathBuf,
    scope: Scope,
    check: Duration,
) -> Result<WatchHandles, DirectoryError> {
    // The watch starts before the first read, so that no change in between is missed.
    let events = open(&path).map_err(|source| DirectoryError::Watch {
        path: path.clone(),
        source,
    })?;
    let mut directory = Directory {
        path: path.clone(),
        scope,
        files: BTreeMap::new(),
    };
    let read = directory.read();
    read.map_err(|source| DirectoryError::Read { path, source })?;
    let (sender, inventory) = watch::channel(Arc::new(directory.inventory()));
    let (reread, requests) = mpsc::channel(16);
    let mut ticks = interval(check);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::spawn(inpod_service::abort_on_panic(
        "manifests",
        follow(directory, events, ticks, requests, sender),
    ));
    Ok((inventory, reread))
}

/// Watches for complete files only: a file is reported on close. Kubernetes swaps the link `..data` of a mounted
/// ConfigMap, and the swap is reported as a move.
fn open(path: &Path) -> io::Result<Events> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CLOSE_WRITE
        | WatchMask::MOVED_TO
        | WatchMask::MOVED_FROM
        | WatchMask::DELETE
        | WatchMask::ONLYDIR;
    inotify.watches().add(path, mask)?;
    inotify.into_event_stream([0; 4096])
}

async fn follow(
    mut directory: Directory,
    mut events: Events,
    mut ticks: Interval,
    mut requests: mpsc::Receiver<oneshot::Sender<()>>,
    sender: watch::Sender<Arc<Inventory>>,
) {
    let mut is_lost = false;
    loop {
        let mut waiting = Vec::new();
        tokio::select! {
            Some(Ok(_)) = events.next() => {}
            // A watch stays with its directory, so each tick watches the directory that has the path now.
            _ = ticks.tick() => events = open(&directory.path).unwrap_or(events),
            Some(first) = requests.recv() => waiting.push(first),
            () = sender.closed() => return,
        }
        // A single read serves all events and requests up to now.
        while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        waiting.extend(iter::from_fn(|| requests.try_recv().ok()));
        let error = match read(directory.clone(), &sender).await {
            Ok(read) => {
                directory = read;
                None
            }
            Err(error) => Some(error),
        };
        let path = directory.path.display();
        match &error {
            Some(error) if !is_lost => {
                tracing::error!(%path, %error, "Cannot read the directory of manifests; keeping the known pods");
            }
            None if is_lost => {
                tracing::info!(%path, "The directory of manifests is readable again");
            }
            Some(_) | None => {}
        }
        is_lost = error.is_some();
        for waiting in waiting {
            waiting.send(()).unwrap_or_default();
        }
    }
}

/// Reads on a blocking thread: many manifests would occupy a worker thread for longer than calls may wait.
async fn read(
    mut directory: Directory,
    sender: &watch::Sender<Arc<Inventory>>,
) -> io::Result<Directory> {
    let sender = sender.clone();
    let read = tokio::task::spawn_blocking(move || {
        directory.read()?;
        publish(&sender, Arc::new(directory.inventory()));
        Ok(directory)
    });
    read.await.map_err(io::Error::other).flatten()
}

#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    scope: Scope,
    files: BTreeMap<PathBuf, File>,
}

#[derive(Clone, Debug)]
struct File {
    /// `None` if the file cannot be read.
    text: Option<Arc<str>>,
    /// The last usable content, or the reason why the file has never been usable.
    content: Result<Arc<Vec<Manifest>>, String>,
}

impl Directory {
    fn read(&mut self) -> io::Result<()> {
        let paths = manifest_files(&self.path)?;
        let mut before = mem::take(&mut self.files);
        for path in paths {
            let read = read_bounded_text(&path, MAX_MANIFEST_BYTES);
            let text = read.as_ref().ok().map(|text| Arc::from(text.as_str()));
            let previous = before.remove(&path);
            if let Some(previous) = previous.as_ref().filter(|known| known.text == text) {
                self.files.insert(path, previous.clone());
                continue;
            }
            let parsed = read.map_err(ManifestError::from);
            let parsed = parsed.and_then(|text| manifest::parse(&text, &self.scope));
            let content = update(&path, previous.map(|known| known.content), parsed);
            self.files.insert(path, File { text, content });
        }
        Ok(())
    }

    /// Returns the inventory of all files. If two files describe the same pod, the first in the order of file names
    /// wins.
    fn inventory(&self) -> Inventory {
        let gap = |(path, file): (&PathBuf, &File)| {
            let error = file.content.as_ref().err()?;
            Some(unusable_message(path, error))
        };
        let mut inventory = Inventory {
            gaps: Arc::new(self.files.iter().filter_map(gap).collect()),
            ..Inventory::default()
        };
        for (path, file) in &self.files {
            for manifest in file.content.iter().flat_map(|manifests| manifests.iter()) {
                if !add(&mut inventory, manifest) {
                    tracing::warn!(file = %path.display(), %manifest, "Ignored a second manifest of the same object");
                }
            }
        }
        inventory
    }
}

/// Returns a file's content after a change. An unusable file keeps its previous content; an empty file is accepted
/// unless it had content or was unusable before.
fn update(
    path: &Path,
    previous: Option<Result<Arc<Vec<Manifest>>, String>>,
    parsed: Result<Vec<Manifest>, ManifestError>,
) -> Result<Arc<Vec<Manifest>>, String> {
    let was_empty = match &previous {
        Some(Ok(manifests)) => manifests.is_empty(),
        Some(Err(_)) => false,
        None => true,
    };
    let error = match parsed {
        Ok(manifests) => return Ok(Arc::new(manifests)),
        Err(ManifestError::Empty) if was_empty => return Ok(Arc::default()),
        Err(error) => format!("{:#}", anyhow::Error::from(error)),
    };
    let file = path.display();
    if let Some(Ok(previous)) = previous {
        tracing::error!(%file, error, "Cannot use a manifest; keeping its previous content");
        return Ok(previous);
    }
    tracing::error!(%file, error, "Cannot use a manifest; it has no previous content");
    Err(error)
}

/// Adds an object unless the inventory already has the object. Returns whether the object was added.
fn add(inventory: &mut Inventory, manifest: &Manifest) -> bool {
    match manifest {
        Manifest::Pod(pod) => {
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            inventory.pods.insert_new(key, (**pod).clone())
        }
        Manifest::Namespace(namespace) => {
            let name = namespace.name.clone();
            inventory.namespaces.insert_new(name, namespace.clone())
        }
    }
}

/// Describes a file that has never been usable. A file that breaks later keeps its content and leaves no gap.
fn unusable_message(file: &Path, error: &str) -> String {
    // The further lines of a YAML error quote the file.
    let error = error.lines().next().unwrap_or_default();
    format!("{} cannot be used: {error}", file.display())
}

fn manifest_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let hidden = path
            .file_name()
            .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !hidden && matches!(extension, Some("yaml" | "yml" | "json")) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests;
