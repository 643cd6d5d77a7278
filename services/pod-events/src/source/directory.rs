//! Pods from a directory of manifests, as kubectl writes them: the way to try inpod, and to run it without a cluster.
//!
//! A file that cannot be used keeps what it said before: a slip of the pen must not take pods out of the mesh. For the
//! same reason what is known stays while the directory is missing.

mod eye;
mod manifest;
mod stamp;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io, iter, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Interval, MissedTickBehavior, interval},
};

use super::{Inventory, Scope};
use eye::Eye;
use manifest::{Manifest, ManifestError};
use stamp::Stamp;

/// How often it is checked whether another directory stands at the path.
pub(super) const CHECK: Duration = Duration::from_secs(5);

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

/// Reads a directory and keeps reading it as it changes. `check` is how often it is checked whether it was replaced.
pub(super) async fn watch(
    path: PathBuf,
    scope: Scope,
    check: Duration,
) -> Result<Watched, DirectoryError> {
    let follower = Follower::start(path, scope)?;
    let (sender, inventory) = watch::channel(Arc::new(follower.directory.inventory()));
    let (reread, requests) = mpsc::channel(16);
    let mut ticks = interval(check);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::spawn(inpod_service::vital(
        "manifests",
        follower.follow(ticks, requests, sender),
    ));
    Ok((inventory, reread))
}

/// A directory, and the eye that is kept on it.
#[derive(Debug)]
struct Follower {
    directory: Directory,
    eye: Eye,
    /// Whether it could not be read or watched the last time, which has been logged then.
    is_lost: bool,
}

impl Follower {
    fn start(path: PathBuf, scope: Scope) -> Result<Self, DirectoryError> {
        // Watching starts before the first look, or what changes in between would be missed.
        let eye = Eye::open(&path).map_err(|source| DirectoryError::Watch {
            path: path.clone(),
            source,
        })?;
        let mut directory = Directory {
            path: path.clone(),
            scope,
            files: BTreeMap::new(),
            unusable: BTreeSet::new(),
        };
        directory
            .read()
            .map_err(|source| DirectoryError::Read { path, source })?;
        Ok(Self {
            directory,
            eye,
            is_lost: false,
        })
    }

    async fn follow(
        mut self,
        mut ticks: Interval,
        mut requests: mpsc::Receiver<oneshot::Sender<()>>,
        sender: watch::Sender<Arc<Inventory>>,
    ) {
        loop {
            let mut asked = Vec::new();
            tokio::select! {
                () = self.eye.changed() => {}
                _ = ticks.tick() => {
                    if !self.look_where_it_was_replaced() {
                        continue;
                    }
                }
                Some(first) = requests.recv() => asked.push(first),
                () = sender.closed() => return,
            }
            // Whatever has happened and was asked by now is answered by one read.
            self.eye.skip();
            asked.extend(iter::from_fn(|| requests.try_recv().ok()));
            self.read(&sender).await;
            for asked in asked {
                // Nobody may be waiting any more.
                asked.send(()).unwrap_or_default();
            }
        }
    }

    /// Turns to the directory that stands at the path, if it is another one. Whether it was and could be.
    fn look_where_it_was_replaced(&mut self) -> bool {
        if self.eye.is_on(&self.directory.path) {
            return false;
        }
        match Eye::open(&self.directory.path) {
            Ok(eye) => {
                self.eye = eye;
                true
            }
            Err(error) => {
                self.lose(&error);
                false
            }
        }
    }

    /// On a thread that may block: with many manifests that takes longer than calls may wait for a worker.
    async fn read(&mut self, sender: &watch::Sender<Arc<Inventory>>) {
        let (mut directory, sender) = (self.directory.clone(), sender.clone());
        let read = tokio::task::spawn_blocking(move || {
            directory.read()?;
            tell(&sender, &directory.inventory());
            io::Result::Ok(directory)
        });
        match read.await.map_err(io::Error::other).flatten() {
            Ok(directory) => {
                self.directory = directory;
                self.find();
            }
            Err(error) => self.lose(&error),
        }
    }

    /// What is known stays. The eye is opened anew even on the same directory, since what happened in it meanwhile
    /// was not read.
    fn lose(&mut self, error: &io::Error) {
        if !self.is_lost {
            let path = self.directory.path.display();
            tracing::error!(%path, %error, "Cannot read the directory of manifests; what is known stays");
        }
        self.is_lost = true;
        self.eye.close();
    }

    fn find(&mut self) {
        if self.is_lost {
            let path = self.directory.path.display();
            tracing::info!(%path, "The directory of manifests can be read again");
        }
        self.is_lost = false;
    }
}

/// The files, and what each last said.
#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    scope: Scope,
    files: BTreeMap<PathBuf, File>,
    /// Those that have said nothing yet that can be used.
    unusable: BTreeSet<PathBuf>,
}

/// A file and what it last said.
#[derive(Clone, Debug)]
struct File {
    manifests: Arc<Vec<Manifest>>,
    /// What it looked like then; `None` where it is to be read again in any case.
    stamp: Option<Stamp>,
}

impl Directory {
    /// Reads the files that do not look as they did.
    fn read(&mut self) -> io::Result<()> {
        let paths = manifests_in(&self.path)?;
        let mut before = mem::take(&mut self.files);
        let unusable = mem::take(&mut self.unusable);
        for path in paths {
            let said = before.remove(&path);
            // Before it is read: what is written meanwhile makes it look otherwise the next time.
            let stamp = Stamp::of(&path);
            if let Some(said) = said.as_ref().filter(|said| said.is_still(stamp)) {
                self.files.insert(path, said.clone());
                continue;
            }
            let manifests = match read_file(&path, &self.scope) {
                Ok(manifests) => manifests,
                // It never said anything, and need not.
                Err(ManifestError::Empty)
                    if !unusable.contains(&path)
                        && said.as_ref().is_none_or(|said| said.manifests.is_empty()) =>
                {
                    Vec::new()
                }
                Err(error) => {
                    self.keep(path, said, error);
                    continue;
                }
            };
            let manifests = Arc::new(manifests);
            self.files.insert(path, File { manifests, stamp });
        }
        Ok(())
    }

    /// Keeps what a file said before, if anything.
    fn keep(&mut self, path: PathBuf, said: Option<File>, error: ManifestError) {
        let error = format!("{:#}", anyhow::Error::from(error));
        let file = path.display();
        if let Some(said) = said {
            tracing::error!(%file, error, "Cannot use a manifest; what it said before stays");
            let stamp = None;
            self.files.insert(path, File { stamp, ..said });
        } else {
            tracing::error!(%file, error, "Cannot use a manifest; what it says is not known");
            self.unusable.insert(path);
        }
    }

    /// Of two manifests of one pod the one in the first file holds, in the order of file names.
    fn inventory(&self) -> Inventory {
        let mut inventory = Inventory {
            gaps: Arc::new(self.unusable.iter().map(|file| gap(file)).collect()),
            ..Inventory::default()
        };
        let all = self.files.iter();
        for (path, manifest) in
            all.flat_map(|(path, file)| file.manifests.iter().map(move |one| (path, one)))
        {
            if !add(&mut inventory, manifest) {
                tracing::warn!(file = %path.display(), %manifest, "Ignored a second manifest of the same name");
            }
        }
        inventory
    }
}

/// Adds what a manifest says, unless it is known already; whether it was not.
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

/// Tells what is known now, if that is news. What stays shares its place with what was told before.
fn tell(sender: &watch::Sender<Arc<Inventory>>, now: &Inventory) {
    // Whoever looks meanwhile does not wait for the comparison: nobody else sends.
    let mut next = Inventory::clone(&sender.borrow());
    let pods = next.pods.adopt(&now.pods);
    let namespaces = next.namespaces.adopt(&now.namespaces);
    let gaps = next.gaps != now.gaps;
    next.gaps = Arc::clone(&now.gaps);
    if pods || namespaces || gaps {
        sender.send_replace(Arc::new(next));
    }
}

impl File {
    fn is_still(&self, stamp: Option<Stamp>) -> bool {
        self.stamp.is_some() && self.stamp == stamp
    }
}

/// A file that broke after it could be used keeps what it said before, and leaves no gap.
fn gap(file: &Path) -> String {
    format!("{} cannot be used", file.display())
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

fn read_file(path: &Path, scope: &Scope) -> Result<Vec<Manifest>, ManifestError> {
    manifest::parse(&fs::read_to_string(path)?, scope)
}

#[cfg(test)]
mod tests;
