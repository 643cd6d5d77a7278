//! Pods from a directory of manifests, as kubectl writes them: the way to try inpod, and to run it without a cluster.
//!
//! A file that cannot be used keeps what it said before: a slip of the pen must not take pods out of the mesh.

mod manifest;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::StreamExt as _;
use inotify::{EventStream, Inotify, WatchMask};
use tokio::sync::{mpsc, oneshot, watch};
use workload::NodeName;

use super::Inventory;
use manifest::Manifest;

/// Why a directory cannot be a source.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be read.
    #[error("setting pods_from: cannot read directory {}", .path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It cannot be watched.
    #[error("setting pods_from: cannot watch directory {}", .path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What `watch` gives: the inventory, and the way to ask for another look.
type Watched = (
    watch::Receiver<Arc<Inventory>>,
    mpsc::Sender<oneshot::Sender<()>>,
);

/// Reads a directory and keeps reading it as it changes.
pub(super) async fn watch(path: PathBuf, node: NodeName) -> Result<Watched, DirectoryError> {
    // Watching starts before the first look, or what changes in between would be missed.
    let events = events(&path).map_err(|source| DirectoryError::Watch {
        path: path.clone(),
        source,
    })?;
    let mut directory = Directory {
        path: path.clone(),
        node,
        files: BTreeMap::new(),
    };
    directory
        .read()
        .map_err(|source| DirectoryError::Read { path, source })?;
    let (sender, inventory) = watch::channel(Arc::new(directory.inventory()));
    let (reread, requests) = mpsc::channel(16);
    tokio::spawn(follow(directory, events, requests, sender));
    Ok((inventory, reread))
}

/// Whole files only: a file that is being written shows when it is closed. Kubernetes swaps the link `..data` of a
/// mounted ConfigMap, which shows as moved.
fn events(path: &Path) -> io::Result<EventStream<[u8; 4096]>> {
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
    mut events: EventStream<[u8; 4096]>,
    mut requests: mpsc::Receiver<oneshot::Sender<()>>,
    sender: watch::Sender<Arc<Inventory>>,
) {
    loop {
        let asked = tokio::select! {
            // An error is an overflow of the queue: whatever was lost, the whole directory is read.
            Some(_) = events.next() => None,
            Some(asked) = requests.recv() => Some(asked),
            () = sender.closed() => return,
            else => return,
        };
        directory = reread(directory).await;
        let inventory = Arc::new(directory.inventory());
        sender.send_if_modified(|known| {
            let changed = **known != *inventory;
            *known = inventory;
            changed
        });
        // Nobody may be waiting any more.
        asked
            .map_or(Ok(()), |asked| asked.send(()))
            .unwrap_or_default();
    }
}

async fn reread(directory: Directory) -> Directory {
    let fallback = directory.clone();
    let look = move || {
        let mut directory = directory;
        if let Err(error) = directory.read() {
            tracing::error!(path = %directory.path.display(), %error, "Cannot read manifests; what is known stays");
        }
        directory
    };
    tokio::task::spawn_blocking(look).await.unwrap_or(fallback)
}

/// The files, and what each last said.
#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    node: NodeName,
    files: BTreeMap<PathBuf, Vec<Manifest>>,
}

impl Directory {
    fn read(&mut self) -> io::Result<()> {
        let mut present = BTreeMap::new();
        for path in manifests_in(&self.path)? {
            let before = self.files.remove(&path);
            match read_file(&path, &self.node) {
                Ok(manifests) => {
                    present.insert(path, manifests);
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    tracing::error!(file = %path.display(), error = format!("{error:#}"), "Cannot use a manifest; what it said before stays");
                    present.insert(path, before.unwrap_or_default());
                }
            }
        }
        self.files = present;
        Ok(())
    }

    /// Of two manifests of one pod the one in the first file holds, in the order of file names.
    fn inventory(&self) -> Inventory {
        let mut inventory = Inventory::default();
        for (path, manifest) in self
            .files
            .iter()
            .flat_map(|(path, all)| all.iter().map(move |one| (path, one)))
        {
            let known = match manifest {
                Manifest::Pod(pod) => {
                    let key = (pod.pod.namespace.clone(), pod.pod.name.clone());
                    let known = inventory.pods.contains_key(&key);
                    inventory.pods.entry(key).or_insert_with(|| pod.clone());
                    known
                }
                Manifest::Namespace(namespace) => {
                    let known = inventory.namespaces.contains_key(&namespace.name);
                    inventory
                        .namespaces
                        .entry(namespace.name.clone())
                        .or_insert_with(|| namespace.clone());
                    known
                }
            };
            if known {
                tracing::warn!(file = %path.display(), %manifest, "Ignored a second manifest of the same name");
            }
        }
        inventory
    }
}

fn manifests_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
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

fn read_file(path: &Path, node: &NodeName) -> Result<Vec<Manifest>, manifest::ManifestError> {
    manifest::parse(&fs::read_to_string(path)?, node)
}

#[cfg(test)]
mod tests;
