//! The objects of one kind, merged from the watch and single GETs.
//!
//! Resource versions of a kind grow in the order of the watch's events: a fetched object is newer than the watch while
//! the object's version is above all versions reported by the watch.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
    mem,
};

use crate::inventory::SharedMap;

#[derive(Clone, Debug)]
pub(super) struct Observed<K, V> {
    /// For example `Pod shop/web`.
    pub(super) title: String,
    /// The resource version, or 0 if the version is not comparable.
    pub(super) version: u64,
    /// The object, or the reason why the object cannot be used.
    pub(super) parsed: Result<(K, V), String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Listing,
    InSync,
    /// The known objects stay until a watch resumes or a list is complete.
    Lost(String),
}

#[derive(Debug)]
pub(super) struct Store<K, V> {
    /// The objects of the watch's last reports.
    watched: SharedMap<K, V>,
    watch_version: u64,
    /// Objects newer than the watch, with their versions: few, and only for moments.
    fetched: BTreeMap<K, (u64, V)>,
    unusable: BTreeSet<String>,
    /// A list in progress, which will replace the known objects.
    list: List<K, V>,
    progress: Progress,
}

#[derive(Debug)]
struct List<K, V> {
    objects: SharedMap<K, V>,
    version: u64,
    unusable: BTreeSet<String>,
}

impl<K, V> Default for List<K, V> {
    fn default() -> Self {
        Self {
            objects: SharedMap::default(),
            version: 0,
            unusable: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Hash + Clone, V: Clone + PartialEq> Store<K, V> {
    pub(super) fn new() -> Self {
        Self {
            watched: SharedMap::default(),
            watch_version: 0,
            fetched: BTreeMap::new(),
            unusable: BTreeSet::new(),
            list: List::default(),
            progress: Progress::Listing,
        }
    }

    pub(super) fn begin_list(&mut self) {
        self.list = List::default();
    }

    pub(super) fn add_listed(&mut self, observed: Observed<K, V>) {
        self.list.version = self.list.version.max(observed.version);
        match observed.parsed {
            Ok((key, value)) => self.list.objects.insert(key, value),
            Err(error) => {
                log_unusable(&self.unusable, &observed.title, &error);
                self.list.unusable.insert(observed.title);
            }
        }
    }

    pub(super) fn finish_list(&mut self, at: u64) {
        let list = mem::take(&mut self.list);
        let at = list.version.max(at);
        if at < self.watch_version {
            // The server's store was restored from a backup. Versions and fetched objects belong to a discarded
            // history, and would stay above the current versions for long.
            self.watch_version = 0;
            self.fetched.clear();
        }
        self.watched = list.objects;
        self.unusable = list.unusable;
        self.progress = Progress::InSync;
        self.advance_to(at);
    }

    /// Applies an event of the watch. An unusable object keeps its previous version.
    pub(super) fn apply(&mut self, observed: Observed<K, V>) {
        match observed.parsed {
            Ok((key, value)) => {
                self.watched.insert(key, value);
                self.unusable.remove(&observed.title);
            }
            Err(error) => {
                log_unusable(&self.unusable, &observed.title, &error);
                self.unusable.insert(observed.title);
            }
        }
        self.advance_to(observed.version);
    }

    pub(super) fn delete(&mut self, observed: Observed<K, V>) {
        self.unusable.remove(&observed.title);
        if let Ok((key, _)) = observed.parsed {
            self.watched.remove(&key);
        }
        self.advance_to(observed.version);
    }

    fn advance_to(&mut self, version: u64) {
        let reached = self.watch_version.max(version);
        self.watch_version = reached;
        self.fetched.retain(|_, (version, _)| *version > reached);
    }

    pub(super) fn set_progress(&mut self, progress: Progress) {
        self.progress = progress;
    }

    /// Inserts a fetched object, unless the watch has already passed the object's version.
    pub(super) fn insert_fetched(&mut self, key: K, version: u64, value: V) {
        if version > self.watch_version {
            self.fetched.insert(key, (version, value));
        }
    }

    /// Removes a fetched object, because the object does not exist.
    pub(super) fn remove_fetched(&mut self, key: &K) {
        self.fetched.remove(key);
    }

    /// Returns the fetched objects that the watch has not reported yet.
    pub(super) fn unconfirmed(&self) -> Vec<K> {
        self.fetched.keys().cloned().collect()
    }

    /// Returns the watched objects, overlaid with the fetched objects.
    pub(super) fn objects(&self) -> SharedMap<K, V> {
        let mut objects = self.watched.clone();
        for (key, (_, value)) in &self.fetched {
            objects.insert(key.clone(), value.clone());
        }
        objects
    }

    pub(super) fn unusable(&self) -> &BTreeSet<String> {
        &self.unusable
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }
}

fn log_unusable(unusable: &BTreeSet<String>, title: &str, error: &str) {
    if !unusable.contains(title) {
        tracing::error!(
            object = title,
            error,
            "Cannot use an object; keeping its previous version"
        );
    }
}

#[cfg(test)]
mod tests;
