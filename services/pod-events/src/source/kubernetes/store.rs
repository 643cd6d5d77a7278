//! The objects of one kind, merged from the watch and single GETs.
//!
//! Resource versions of a kind grow in the order of the watch's events: a fetched object is newer than the watch while
//! the object's version is above all versions reported by the watch.
//!
//! Changes are made in place, so the cost of an event does not depend on the number of objects.

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
    /// The objects of the watch, overlaid with the fetched objects.
    objects: SharedMap<K, V>,
    watch_version: u64,
    /// Objects newer than the watch: few, and only for moments.
    fetched: BTreeMap<K, Fetched<V>>,
    unusable: BTreeSet<String>,
    list: PendingList<K, V>,
    progress: Progress,
    changed: Changed,
}

#[derive(Debug)]
struct Fetched<V> {
    version: u64,
    /// The object in the watch's last report.
    watched: Option<V>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Changed {
    pub(super) objects: bool,
    /// The watch's progress or the set of unusable objects changed.
    pub(super) gaps: bool,
}

/// A list in progress, which will replace the known objects.
#[derive(Debug)]
struct PendingList<K, V> {
    objects: SharedMap<K, V>,
    version: u64,
    unusable: BTreeSet<String>,
}

impl<K, V> PendingList<K, V> {
    fn new() -> Self {
        Self {
            objects: SharedMap::new(),
            version: 0,
            unusable: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Hash + Clone, V: Clone + PartialEq> Store<K, V> {
    pub(super) fn new() -> Self {
        Self {
            objects: SharedMap::new(),
            watch_version: 0,
            fetched: BTreeMap::new(),
            unusable: BTreeSet::new(),
            list: PendingList::new(),
            progress: Progress::Listing,
            changed: Changed::default(),
        }
    }

    pub(super) fn begin_list(&mut self) {
        self.list = PendingList::new();
    }

    pub(super) fn add_listed(&mut self, observed: Observed<K, V>) {
        self.list.version = self.list.version.max(observed.version);
        match observed.parsed {
            Ok((key, value)) => drop(self.list.objects.insert(key, value)),
            Err(error) => {
                log_unusable(&self.unusable, &observed.title, &error);
                self.list.unusable.insert(observed.title);
            }
        }
    }

    pub(super) fn finish_list(&mut self, at: u64) {
        let mut list = mem::replace(&mut self.list, PendingList::new());
        let at = list.version.max(at);
        if at < self.watch_version {
            self.reset_versions();
        }
        for (key, fetched) in &mut self.fetched {
            fetched.watched = list.objects.get(key).cloned();
            if let Some(value) = self.objects.get(key) {
                list.objects.insert(key.clone(), value.clone());
            }
        }
        self.changed.objects |= self.objects.update_to(&list.objects);
        self.changed.gaps |= self.unusable != list.unusable;
        self.unusable = list.unusable;
        self.set_progress(Progress::InSync);
        self.advance_to(at);
    }

    /// After the server's store was restored from a backup, versions and fetched objects belong to a discarded
    /// history, and would stay above the current versions for long.
    fn reset_versions(&mut self) {
        self.watch_version = 0;
        self.fetched.clear();
    }

    /// Applies an event of the watch. An unusable object keeps its previous version.
    pub(super) fn apply(&mut self, observed: Observed<K, V>) {
        match observed.parsed {
            Ok((key, value)) => {
                self.apply_watched(&key, Some(value));
                self.changed.gaps |= self.unusable.remove(&observed.title);
            }
            Err(error) => {
                log_unusable(&self.unusable, &observed.title, &error);
                self.changed.gaps |= self.unusable.insert(observed.title);
            }
        }
        self.advance_to(observed.version);
    }

    pub(super) fn delete(&mut self, observed: Observed<K, V>) {
        self.changed.gaps |= self.unusable.remove(&observed.title);
        if let Ok((key, _)) = observed.parsed {
            self.apply_watched(&key, None);
        }
        self.advance_to(observed.version);
    }

    fn apply_watched(&mut self, key: &K, value: Option<V>) {
        if let Some(fetched) = self.fetched.get_mut(key) {
            fetched.watched = value;
        } else {
            self.set(key, value);
        }
    }

    fn set(&mut self, key: &K, value: Option<V>) {
        self.changed.objects |= match value {
            Some(value) => self.objects.insert(key.clone(), value),
            None => self.objects.remove(key),
        };
    }

    fn advance_to(&mut self, version: u64) {
        self.watch_version = self.watch_version.max(version);
        let reached = |(_, fetched): &(&K, &Fetched<V>)| fetched.version <= self.watch_version;
        let reached = self.fetched.iter().filter(reached);
        let reached: Vec<_> = reached.map(|(key, _)| key.clone()).collect();
        reached.iter().for_each(|key| self.remove_fetched(key));
    }

    pub(super) fn disconnected(&mut self, why: String) {
        self.set_progress(Progress::Lost(why));
    }

    /// Marks the watch as resumed: further events cover everything since the connection was lost.
    pub(super) fn resumed(&mut self) {
        self.set_progress(Progress::InSync);
    }

    fn set_progress(&mut self, progress: Progress) {
        self.changed.gaps |= self.progress != progress;
        self.progress = progress;
    }

    /// Inserts a fetched object, unless the watch has already passed the object's version.
    pub(super) fn insert_fetched(&mut self, key: K, version: u64, value: V) {
        if version <= self.watch_version {
            return;
        }
        let watched = match self.fetched.remove(&key) {
            Some(earlier) => earlier.watched,
            None => self.objects.get(&key).cloned(),
        };
        self.set(&key, Some(value));
        self.fetched.insert(key, Fetched { version, watched });
    }

    /// Removes a fetched object, because the object does not exist or the watch has reached its version.
    pub(super) fn remove_fetched(&mut self, key: &K) {
        if let Some(fetched) = self.fetched.remove(key) {
            self.set(key, fetched.watched);
        }
    }

    /// Returns the fetched objects that the watch has not reported yet.
    pub(super) fn unconfirmed(&self) -> Vec<K> {
        self.fetched.keys().cloned().collect()
    }

    pub(super) fn objects(&self) -> &SharedMap<K, V> {
        &self.objects
    }

    pub(super) fn take_changes(&mut self) -> Changed {
        mem::take(&mut self.changed)
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
