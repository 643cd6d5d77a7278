//! What the watch has shown of one kind of object, and what was asked for past it: which of them is the later word.
//!
//! Versions of objects of one kind grow in the order in which the watch tells of them. An object that was asked for is
//! the later word exactly as long as its version is above everything that the watch has told.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

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
    /// The server was lost: this is why. What is known stays until a whole list is in again.
    Lost(String),
}

/// All objects of one kind.
#[derive(Debug)]
pub(super) struct Layer<K, V> {
    watched: BTreeMap<K, V>,
    /// The highest version that the watch has told of.
    told: u64,
    asked: BTreeMap<K, (u64, V)>,
    unusable: BTreeSet<String>,
    list: List<K, V>,
    progress: Progress,
    /// Whether something else is known than when it was last asked.
    has_changed: bool,
}

/// A list that is coming in: it takes the place of what is known when it is whole.
#[derive(Debug)]
struct List<K, V> {
    objects: BTreeMap<K, V>,
    told: u64,
    unusable: BTreeSet<String>,
}

impl<K, V> List<K, V> {
    fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            told: 0,
            unusable: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Clone, V: Clone + PartialEq> Layer<K, V> {
    pub(super) fn new() -> Self {
        Self {
            watched: BTreeMap::new(),
            told: 0,
            asked: BTreeMap::new(),
            unusable: BTreeSet::new(),
            list: List::new(),
            progress: Progress::Listing,
            has_changed: true,
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

    /// The list is whole.
    pub(super) fn finish_list(&mut self) {
        let list = mem::replace(&mut self.list, List::new());
        self.watched = list.objects;
        self.unusable = list.unusable;
        self.progress = Progress::InSync;
        self.has_changed = true;
        self.tell(list.told);
    }

    /// The watch shows an object. One that cannot be used keeps what it said before.
    pub(super) fn apply(&mut self, seen: Seen<K, V>) {
        match seen.parsed {
            Ok((key, value)) => {
                self.has_changed |= self.watched.get(&key) != Some(&value);
                self.watched.insert(key, value);
                self.has_changed |= self.unusable.remove(&seen.title);
            }
            Err(error) => {
                complain(&self.unusable, &seen.title, &error);
                self.has_changed |= self.unusable.insert(seen.title);
            }
        }
        self.tell(seen.version);
    }

    /// The watch says that an object is gone.
    pub(super) fn delete(&mut self, seen: Seen<K, V>) {
        self.has_changed = true;
        self.unusable.remove(&seen.title);
        if let Ok((key, _)) = seen.parsed {
            self.watched.remove(&key);
        }
        self.tell(seen.version);
    }

    fn tell(&mut self, version: u64) {
        self.told = self.told.max(version);
        let told = self.told;
        let before = self.asked.len();
        self.asked.retain(|_, (asked, _)| *asked > told);
        self.has_changed |= self.asked.len() != before;
    }

    /// The server was lost.
    pub(super) fn lose(&mut self, why: String) {
        self.progress = Progress::Lost(why);
        self.has_changed = true;
    }

    /// An object that was asked for. Where the watch has come further it knows better, and nothing is kept.
    pub(super) fn learn(&mut self, key: K, version: u64, value: V) {
        if version > self.told {
            self.asked.insert(key, (version, value));
            self.has_changed = true;
        }
    }

    /// An object that was asked for is not there (any more).
    pub(super) fn unlearn(&mut self, key: &K) {
        self.has_changed |= self.asked.remove(key).is_some();
    }

    /// The objects that were asked for and not told of yet.
    pub(super) fn unconfirmed(&self) -> Vec<K> {
        self.asked.keys().cloned().collect()
    }

    /// Everything that is known.
    pub(super) fn known(&self) -> BTreeMap<K, V> {
        let mut known = self.watched.clone();
        let asked = self.asked.iter();
        known.extend(asked.map(|(key, (_, value))| (key.clone(), value.clone())));
        known
    }

    /// Whether something else is known than when this was last asked.
    pub(super) fn has_changed(&mut self) -> bool {
        mem::take(&mut self.has_changed)
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
mod tests {
    use super::*;

    fn seen(key: &'static str, version: u64, value: u32) -> Seen<&'static str, u32> {
        Seen {
            title: key.to_owned(),
            version,
            parsed: Ok((key, value)),
        }
    }

    fn broken(key: &'static str, version: u64) -> Seen<&'static str, u32> {
        Seen {
            title: key.to_owned(),
            version,
            parsed: Err("it is odd".to_owned()),
        }
    }

    /// A layer after a list at version 10.
    fn layer() -> Layer<&'static str, u32> {
        let mut layer = Layer::new();
        layer.begin_list();
        layer.list(seen("a", 4, 1));
        layer.list(seen("b", 10, 1));
        layer.finish_list();
        layer
    }

    fn known(layer: &Layer<&'static str, u32>) -> Vec<(&'static str, u32)> {
        layer.known().into_iter().collect()
    }

    #[test]
    fn nothing_of_a_list_is_known_before_it_is_whole() {
        let mut layer = Layer::new();
        layer.begin_list();
        layer.list(seen("a", 4, 1));
        assert_eq!(
            (known(&layer), layer.progress()),
            (vec![], &Progress::Listing)
        );
        layer.finish_list();
        assert_eq!(
            (known(&layer), layer.progress()),
            (vec![("a", 1)], &Progress::InSync)
        );
    }

    #[test]
    fn a_second_list_replaces_the_first_at_once_and_one_that_breaks_off_changes_nothing() {
        let mut layer = layer();
        layer.begin_list();
        layer.list(seen("c", 12, 1));
        layer.lose("gone".to_owned());
        assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
        layer.begin_list();
        layer.list(seen("d", 13, 1));
        assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
        assert_eq!(layer.progress(), &Progress::Lost("gone".to_owned()));
        layer.finish_list();
        assert_eq!(known(&layer), [("d", 1)]);
        assert_eq!(layer.progress(), &Progress::InSync);
    }

    #[test]
    fn what_was_asked_for_holds_until_the_watch_has_come_as_far() {
        let mut layer = layer();
        layer.learn("c", 15, 2);
        layer.apply(seen("a", 12, 7));
        assert_eq!(known(&layer), [("a", 7), ("b", 1), ("c", 2)]);
        layer.apply(seen("c", 15, 3));
        assert_eq!(known(&layer), [("a", 7), ("b", 1), ("c", 3)]);
    }

    #[test]
    fn what_changes_nothing_is_not_told() {
        let mut layer = layer();
        assert!(layer.has_changed());
        layer.apply(seen("a", 12, 1));
        layer.begin_list();
        layer.list(seen("c", 12, 1));
        assert!(!layer.has_changed());
        layer.apply(seen("a", 13, 2));
        assert!(layer.has_changed());
    }

    #[test]
    fn an_answer_that_comes_after_the_watch_has_passed_it_is_not_kept() {
        let mut layer = layer();
        layer.apply(seen("c", 15, 3));
        layer.delete(seen("c", 16, 3));
        layer.learn("c", 15, 2);
        assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
    }

    #[test]
    fn a_pod_that_was_asked_for_and_is_deleted_does_not_stay() {
        let mut told = layer();
        told.learn("c", 15, 2);
        told.delete(seen("c", 17, 2));
        assert_eq!(known(&told), [("a", 1), ("b", 1)]);
        let mut passed = layer();
        passed.learn("c", 15, 2);
        passed.apply(seen("a", 18, 2));
        assert_eq!(known(&passed), [("a", 2), ("b", 1)]);
        // Where the watch is silent it is asked for again.
        let mut silent = layer();
        silent.learn("c", 15, 2);
        assert_eq!(silent.unconfirmed(), ["c"]);
        silent.unlearn(&"c");
        assert_eq!(known(&silent), [("a", 1), ("b", 1)]);
    }

    #[test]
    fn a_successor_that_was_asked_for_outlives_the_late_news_of_its_predecessors_end() {
        let mut layer = layer();
        layer.learn("b", 20, 2);
        layer.delete(seen("b", 19, 1));
        assert_eq!(known(&layer), [("a", 1), ("b", 2)]);
    }

    #[test]
    fn an_object_that_cannot_be_used_keeps_what_it_said_and_is_named() {
        let mut layer = layer();
        layer.apply(broken("a", 11));
        assert_eq!(known(&layer), [("a", 1), ("b", 1)]);
        assert_eq!(layer.unusable(), &BTreeSet::from(["a".to_owned()]));
        layer.apply(seen("a", 12, 2));
        assert_eq!(layer.unusable(), &BTreeSet::new());
    }
}
