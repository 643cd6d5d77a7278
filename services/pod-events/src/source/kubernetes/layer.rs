//! What the watch has shown of one kind of object, and what was asked for past it: which of them is the later word.
//!
//! Versions of objects of one kind grow in the order in which the watch tells of them. An object that was asked for is
//! the later word exactly as long as its version is above everything that the watch has told.
//!
//! What is known is kept as it is told, in place: an event costs what it changes, however much else is known.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
    mem,
};

use crate::source::SharedMap;

/// One object as it came, parsed as far as that was possible.
#[derive(Clone, Debug)]
pub(super) struct Seen<K, V> {
    /// Its title for people: `Pod shop/web`.
    pub(super) title: String,
    /// Its resource version; 0 where it has none that can be compared.
    pub(super) version: u64,
    /// What it says, or why that cannot be used.
    pub(super) parsed: Result<(K, V), String>,
}

/// How far the watch has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The first list is not in.
    Listing,
    /// Everything is known as it comes.
    InSync,
    /// The server was lost: this is why. What is known stays until a watch goes on or a whole list is in.
    Lost(String),
}

/// All objects of one kind.
#[derive(Debug)]
pub(super) struct Layer<K, V> {
    /// What the watch says, and over it what was asked for.
    known: SharedMap<K, V>,
    /// The highest version that the watch has told of.
    told: u64,
    asked: BTreeMap<K, Asked<V>>,
    /// The same, by version.
    by_version: BTreeSet<(u64, K)>,
    unusable: BTreeSet<String>,
    list: List<K, V>,
    progress: Progress,
    news: News,
}

/// An object that was asked for, of which the watch has not told yet.
#[derive(Debug)]
struct Asked<V> {
    version: u64,
    /// What the watch says of it, if anything.
    beneath: Option<V>,
}

/// What is otherwise than when it was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Other objects are known, or they say something else.
    pub(super) objects: bool,
    /// The watch has come elsewhere, or other objects cannot be used.
    pub(super) gaps: bool,
}

/// A list that is coming in: it takes the place of what is known when it is whole.
#[derive(Debug)]
struct List<K, V> {
    objects: SharedMap<K, V>,
    told: u64,
    unusable: BTreeSet<String>,
}

impl<K, V> List<K, V> {
    fn new() -> Self {
        Self {
            objects: SharedMap::new(),
            told: 0,
            unusable: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Hash + Clone, V: Clone + PartialEq> Layer<K, V> {
    pub(super) fn new() -> Self {
        Self {
            known: SharedMap::new(),
            told: 0,
            asked: BTreeMap::new(),
            by_version: BTreeSet::new(),
            unusable: BTreeSet::new(),
            list: List::new(),
            progress: Progress::Listing,
            news: News::default(),
        }
    }

    /// A list begins.
    pub(super) fn begin_list(&mut self) {
        self.list = List::new();
    }

    /// The list names an object.
    pub(super) fn list(&mut self, seen: Seen<K, V>) {
        self.list.told = self.list.told.max(seen.version);
        match seen.parsed {
            Ok((key, value)) => drop(self.list.objects.insert(key, value)),
            Err(error) => {
                complain(&self.unusable, &seen.title, &error);
                self.list.unusable.insert(seen.title);
            }
        }
    }

    /// The list is whole, and shows what there was at a version.
    pub(super) fn finish_list(&mut self, at: u64) {
        let mut list = mem::replace(&mut self.list, List::new());
        let at = list.told.max(at);
        if at < self.told {
            self.begin_anew();
        }
        for (key, asked) in &mut self.asked {
            asked.beneath = list.objects.get(key).cloned();
            if let Some(value) = self.known.get(key) {
                list.objects.insert(key.clone(), value.clone());
            }
        }
        self.news.objects |= self.known.adopt(&list.objects);
        self.news.gaps |= self.unusable != list.unusable;
        self.unusable = list.unusable;
        self.come_to(Progress::InSync);
        self.tell(at);
    }

    /// The server's store was put back to what it was earlier: versions that were told or asked for are of what never
    /// was, and would be above whatever there is for long.
    fn begin_anew(&mut self) {
        self.told = 0;
        self.asked.clear();
        self.by_version.clear();
    }

    /// The watch shows an object. One that cannot be used keeps what it said before.
    pub(super) fn apply(&mut self, seen: Seen<K, V>) {
        match seen.parsed {
            Ok((key, value)) => {
                self.watch_says(&key, Some(value));
                self.news.gaps |= self.unusable.remove(&seen.title);
            }
            Err(error) => {
                complain(&self.unusable, &seen.title, &error);
                self.news.gaps |= self.unusable.insert(seen.title);
            }
        }
        self.tell(seen.version);
    }

    /// The watch says that an object is gone.
    pub(super) fn delete(&mut self, seen: Seen<K, V>) {
        self.news.gaps |= self.unusable.remove(&seen.title);
        if let Ok((key, _)) = seen.parsed {
            self.watch_says(&key, None);
        }
        self.tell(seen.version);
    }

    fn watch_says(&mut self, key: &K, value: Option<V>) {
        if let Some(asked) = self.asked.get_mut(key) {
            asked.beneath = value;
        } else {
            self.know(key, value);
        }
    }

    fn know(&mut self, key: &K, value: Option<V>) {
        self.news.objects |= match value {
            Some(value) => self.known.insert(key.clone(), value),
            None => self.known.remove(key),
        };
    }

    fn tell(&mut self, version: u64) {
        self.told = self.told.max(version);
        while let Some((_, key)) = self
            .by_version
            .first()
            .filter(|(asked, _)| *asked <= self.told)
            .cloned()
        {
            self.unlearn(&key);
        }
    }

    /// The server was lost.
    pub(super) fn lose(&mut self, why: String) {
        self.come_to(Progress::Lost(why));
    }

    /// The watch goes on where it stood when the server was lost: what it tells from here on is all that happened since.
    pub(super) fn resume(&mut self) {
        self.come_to(Progress::InSync);
    }

    fn come_to(&mut self, progress: Progress) {
        self.news.gaps |= self.progress != progress;
        self.progress = progress;
    }

    /// An object that was asked for. Where the watch has come further it knows better, and nothing is kept.
    pub(super) fn learn(&mut self, key: K, version: u64, value: V) {
        if version <= self.told {
            return;
        }
        let beneath = match self.asked.remove(&key) {
            Some(earlier) => {
                self.by_version.remove(&(earlier.version, key.clone()));
                earlier.beneath
            }
            None => self.known.get(&key).cloned(),
        };
        self.know(&key, Some(value));
        self.by_version.insert((version, key.clone()));
        self.asked.insert(key, Asked { version, beneath });
    }

    /// What was asked for counts no more: it is not there (any more), or the watch has come as far.
    pub(super) fn unlearn(&mut self, key: &K) {
        if let Some(asked) = self.asked.remove(key) {
            self.by_version.remove(&(asked.version, key.clone()));
            self.know(key, asked.beneath);
        }
    }

    /// The objects that were asked for and not told of yet.
    pub(super) fn unconfirmed(&self) -> Vec<K> {
        self.asked.keys().cloned().collect()
    }

    /// Everything that is known.
    pub(super) fn known(&self) -> &SharedMap<K, V> {
        &self.known
    }

    /// What is otherwise than when this was last asked.
    pub(super) fn news(&mut self) -> News {
        mem::take(&mut self.news)
    }

    /// Titles of objects that cannot be used.
    pub(super) fn unusable(&self) -> &BTreeSet<String> {
        &self.unusable
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }
}

fn complain(known: &BTreeSet<String>, title: &str, error: &str) {
    if !known.contains(title) {
        tracing::error!(
            object = title,
            error,
            "Cannot use an object; what it said before stays"
        );
    }
}

#[cfg(test)]
mod tests;
