//! Pods from a directory of manifests in the format of kubectl, to try inpod or run it without a cluster.
//!
//! An unusable file keeps its previous content, and a missing directory keeps the last inventory, so that a typing
//! error takes no pod out of the mesh.

mod manifest;
mod metadata;
mod watcher;

use std::{
    collections::BTreeMap,
    fs, io, iter, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use inpod_service::read_bounded_text;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Interval, MissedTickBehavior, interval},
};

use super::{Inventory, Scope};
use manifest::{Manifest, ManifestError};
use metadata::FileMetadata;
use watcher::Watcher;

/// The interval of checking whether the path names another directory.
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

/// Reads a directory again after every change. `check` is the interval of checking whether the directory was replaced.
pub(super) async fn watch(
    path: PathBuf,
    scope: Scope,
    check: Duration,
) -> Result<WatchHandles, DirectoryError> {
    let source = DirectorySource::start(path, scope)?;
    let (sender, inventory) = watch::channel(Arc::new(source.directory.inventory()));
    let (reread, requests) = mpsc::channel(16);
    let mut ticks = interval(check);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::spawn(inpod_service::abort_on_panic(
        "manifests",
        source.run(ticks, requests, sender),
    ));
    Ok((inventory, reread))
}

#[derive(Debug)]
struct DirectorySource {
    directory: Directory,
    watcher: Watcher,
    /// Set after a failed and logged read or watch.
    is_lost: bool,
}

impl DirectorySource {
    fn start(path: PathBuf, scope: Scope) -> Result<Self, DirectoryError> {
        // The watch starts before the first read, so that no change in between is missed.
        let watcher = Watcher::open(&path).map_err(|source| DirectoryError::Watch {
            path: path.clone(),
            source,
        })?;
        let mut directory = Directory {
            path: path.clone(),
            scope,
            files: BTreeMap::new(),
            unusable: BTreeMap::new(),
        };
        directory
            .read()
            .map_err(|source| DirectoryError::Read { path, source })?;
        Ok(Self {
            directory,
            watcher,
            is_lost: false,
        })
    }

    async fn run(
        mut self,
        mut ticks: Interval,
        mut requests: mpsc::Receiver<oneshot::Sender<()>>,
        sender: watch::Sender<Arc<Inventory>>,
    ) {
        loop {
            let mut waiting = Vec::new();
            tokio::select! {
                () = self.watcher.changed() => {}
                _ = ticks.tick() => {
                    if !self.reopen_if_replaced() {
                        continue;
                    }
                }
                Some(first) = requests.recv() => waiting.push(first),
                () = sender.closed() => return,
            }
            // A single read serves all events and requests up to now.
            self.watcher.discard_pending();
            waiting.extend(iter::from_fn(|| requests.try_recv().ok()));
            self.read(&sender).await;
            for waiting in waiting {
                waiting.send(()).unwrap_or_default();
            }
        }
    }

    /// Watches the directory at the path if another directory was watched before. Returns whether the directory was
    /// replaced.
    fn reopen_if_replaced(&mut self) -> bool {
        if self.watcher.is_watching(&self.directory.path) {
            return false;
        }
        match Watcher::open(&self.directory.path) {
            Ok(watcher) => {
                self.watcher = watcher;
                true
            }
            Err(error) => {
                self.mark_lost(&error);
                false
            }
        }
    }

    /// Reads on a blocking thread: many manifests would occupy a worker thread for longer than calls may wait.
    async fn read(&mut self, sender: &watch::Sender<Arc<Inventory>>) {
        let (mut directory, sender) = (self.directory.clone(), sender.clone());
        let read = tokio::task::spawn_blocking(move || {
            directory.read()?;
            publish(&sender, &directory.inventory());
            io::Result::Ok(directory)
        });
        match read.await.map_err(io::Error::other).flatten() {
            Ok(directory) => {
                self.directory = directory;
                self.mark_found();
            }
            Err(error) => self.mark_lost(&error),
        }
    }

    /// Keeps the inventory and drops the watch even if the directory stays the same, because changes during the failure
    /// were not read.
    fn mark_lost(&mut self, error: &io::Error) {
        if !self.is_lost {
            let path = self.directory.path.display();
            tracing::error!(%path, %error, "Cannot read the directory of manifests; keeping the known pods");
        }
        self.is_lost = true;
        self.watcher.close();
    }

    fn mark_found(&mut self) {
        if self.is_lost {
            let path = self.directory.path.display();
            tracing::info!(%path, "The directory of manifests is readable again");
        }
        self.is_lost = false;
    }
}

/// The manifest files with their last usable content.
#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    scope: Scope,
    files: BTreeMap<PathBuf, File>,
    /// Files that have never been usable.
    unusable: BTreeMap<PathBuf, String>,
}

#[derive(Clone, Debug)]
struct File {
    manifests: Arc<Vec<Manifest>>,
    /// The metadata read together with the content; `None` if the file has to be read again in any case.
    metadata: Option<FileMetadata>,
}

impl Directory {
    fn read(&mut self) -> io::Result<()> {
        let paths = manifest_files(&self.path)?;
        let mut before = mem::take(&mut self.files);
        let unusable = mem::take(&mut self.unusable);
        for path in paths {
            let previous = before.remove(&path);
            // The metadata is taken before the read, so that a write in between causes another read.
            let metadata = FileMetadata::of(&path);
            if let Some(previous) = previous
                .as_ref()
                .filter(|previous| previous.is_unchanged(metadata))
            {
                self.files.insert(path, previous.clone());
                continue;
            }
            let manifests = match read_file(&path, &self.scope) {
                Ok(manifests) => manifests,
                // An empty file is accepted unless it had content before.
                Err(ManifestError::Empty)
                    if !unusable.contains_key(&path)
                        && previous
                            .as_ref()
                            .is_none_or(|previous| previous.manifests.is_empty()) =>
                {
                    Vec::new()
                }
                Err(error) => {
                    self.keep_previous(path, previous, error);
                    continue;
                }
            };
            let manifests = Arc::new(manifests);
            self.files.insert(
                path,
                File {
                    manifests,
                    metadata,
                },
            );
        }
        Ok(())
    }

    fn keep_previous(&mut self, path: PathBuf, previous: Option<File>, error: ManifestError) {
        let error = format!("{:#}", anyhow::Error::from(error));
        let file = path.display();
        if let Some(previous) = previous {
            tracing::error!(%file, error, "Cannot use a manifest; keeping its previous content");
            let metadata = None;
            self.files.insert(
                path,
                File {
                    metadata,
                    ..previous
                },
            );
        } else {
            tracing::error!(%file, error, "Cannot use a manifest; it has no previous content");
            self.unusable.insert(path, error);
        }
    }

    /// Returns the inventory of all files. If two files describe the same pod, the first in the order of file names
    /// wins.
    fn inventory(&self) -> Inventory {
        let mut inventory = Inventory {
            gaps: Arc::new(
                self.unusable
                    .iter()
                    .map(|(file, error)| unusable_message(file, error))
                    .collect(),
            ),
            ..Inventory::default()
        };
        let all = self.files.iter();
        for (path, manifest) in
            all.flat_map(|(path, file)| file.manifests.iter().map(move |one| (path, one)))
        {
            if !add(&mut inventory, manifest) {
                tracing::warn!(file = %path.display(), %manifest, "Ignored a second manifest of the same object");
            }
        }
        inventory
    }
}

/// Adds an object unless the inventory already has the object. Returns whether the object was added.
fn add(inventory: &mut Inventory, manifest: &Manifest) -> bool {
    match manifest {
        Manifest::Pod(pod) => {
            let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
            !inventory.pods.contains_key(&key) && inventory.pods.insert(key, (**pod).clone())
        }
        Manifest::Namespace(namespace) => {
            let name = namespace.name.clone();
            !inventory.namespaces.contains_key(&name)
                && inventory.namespaces.insert(name, namespace.clone())
        }
    }
}

/// Publishes the inventory if it differs, sharing all unchanged parts.
fn publish(sender: &watch::Sender<Arc<Inventory>>, now: &Inventory) {
    // Compares outside of the channel's lock, so as not to block readers. There is only one sender.
    let mut next = Inventory::clone(&sender.borrow());
    let pods = next.pods.update_to(&now.pods);
    let namespaces = next.namespaces.update_to(&now.namespaces);
    let gaps = next.gaps != now.gaps;
    next.gaps = Arc::clone(&now.gaps);
    if pods || namespaces || gaps {
        sender.send_replace(Arc::new(next));
    }
}

impl File {
    fn is_unchanged(&self, metadata: Option<FileMetadata>) -> bool {
        self.metadata.is_some() && self.metadata == metadata
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

fn read_file(path: &Path, scope: &Scope) -> Result<Vec<Manifest>, ManifestError> {
    manifest::parse(&read_bounded_text(path, MAX_MANIFEST_BYTES)?, scope)
}

#[cfg(test)]
mod tests;
