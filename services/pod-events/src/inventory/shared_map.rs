//! A map whose clones share their content, for a snapshot per event.
//!
//! The entries are spread over shards by the hash of the key. A change of a shared map copies the references of one
//! shard, and a comparison of two clones skips the shards that both share, so both stay cheap beside the 10,000
//! namespaces of a large cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher as _},
    sync::Arc,
};

use itertools::{EitherOrBoth, Itertools as _};

const SHARDS: usize = 64;

type Shard<K, V> = Arc<BTreeMap<Arc<K>, Arc<V>>>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMap<K, V>(Arc<[Shard<K, V>; SHARDS]>);

impl<K, V> SharedMap<K, V> {
    pub fn len(&self) -> usize {
        self.0.iter().map(|shard| shard.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the entries in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let entries = self.0.iter().flat_map(|shard| shard.iter());
        entries.map(|(key, value)| (&**key, &**value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K: Ord + Hash, V> SharedMap<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        let shard = self.0.get(shard_of(key))?;
        shard.get(key).map(|value| &**value)
    }

    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    pub fn remove(&mut self, key: &K) {
        if self.contains_key(key) {
            self.change(key, |shard| {
                shard.remove(key);
            });
        }
    }

    fn put(&mut self, key: K, value: V) {
        let key = Arc::new(key);
        self.change(&Arc::clone(&key), |shard| {
            shard.insert(key, Arc::new(value));
        });
    }

    fn change(&mut self, key: &K, change: impl FnOnce(&mut BTreeMap<Arc<K>, Arc<V>>)) {
        if let Some(shard) = Arc::make_mut(&mut self.0).get_mut(shard_of(key)) {
            change(Arc::make_mut(shard));
        }
    }
}

fn shard_of(key: &impl Hash) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let [first, ..] = hasher.finish().to_ne_bytes();
    usize::from(first) % SHARDS
}

impl<K: Ord + Hash, V: PartialEq> SharedMap<K, V> {
    /// Inserts a value. An equal value copies nothing.
    pub fn insert(&mut self, key: K, value: V) {
        if self.get(&key) != Some(&value) {
            self.put(key, value);
        }
    }

    /// Inserts a value unless the map has the key. Returns whether the value was inserted.
    pub fn insert_new(&mut self, key: K, value: V) -> bool {
        let is_new = !self.contains_key(&key);
        if is_new {
            self.put(key, value);
        }
        is_new
    }
}

impl<K: Ord + Clone, V: PartialEq> SharedMap<K, V> {
    /// Returns the keys whose value differs from an earlier clone, and the keys present in only one of the two maps.
    pub fn differences(&self, before: &Self) -> BTreeSet<K> {
        let shards = self.0.iter().zip(before.0.iter());
        let changed = shards.filter(|(now, before)| !Arc::ptr_eq(now, before));
        changed
            .flat_map(|(now, before)| keys_that_differ(now, before))
            .collect()
    }
}

fn keys_that_differ<K: Ord + Clone, V: PartialEq>(
    now: &BTreeMap<Arc<K>, Arc<V>>,
    before: &BTreeMap<Arc<K>, Arc<V>>,
) -> Vec<K> {
    let is_same = |now: &Arc<V>, before: &Arc<V>| Arc::ptr_eq(now, before) || now == before;
    let both = now
        .iter()
        .merge_join_by(before, |now, before| now.0.cmp(before.0));
    let changed = both.filter_map(|entry| match entry {
        EitherOrBoth::Both((_, now), (_, before)) if is_same(now, before) => None,
        EitherOrBoth::Both((key, _), _)
        | EitherOrBoth::Left((key, _))
        | EitherOrBoth::Right((key, _)) => Some(K::clone(key)),
    });
    changed.collect()
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        let empty = Shard::default();
        Self(Arc::new(std::array::from_fn(|_| Arc::clone(&empty))))
    }
}

impl<K: Ord + Hash, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(entries: T) -> Self {
        let mut map = Self::default();
        for (key, value) in entries {
            map.put(key, value);
        }
        map
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
        let now: BTreeMap<_, _> = map.iter().collect();
        assert_eq!(now, [(&0, &0), (&1, &7), (&3, &3)].into());
        assert_eq!((map.len(), before.len()), (3, 3));
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

    #[test]
    fn a_change_copies_and_compares_a_small_part_of_a_large_map() {
        let before = numbers(0..10_000);
        let mut now = before.clone();
        now.insert(5_000, 0);
        let shards = now.0.iter().zip(before.0.iter());
        let copied: Vec<_> = shards
            .filter(|(now, before)| !Arc::ptr_eq(now, before))
            .map(|(now, _)| now.len())
            .collect();
        assert!(matches!(copied[..], [1..300]), "{copied:?}");
    }
}
