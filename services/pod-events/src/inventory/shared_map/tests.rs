use std::{cell::Cell, collections::BTreeMap, hash::Hasher};

use super::*;

thread_local! {
    /// Counts hashes of keys and comparisons.
    static TOUCHED: Cell<usize> = const { Cell::new(0) };
}

fn touch() {
    TOUCHED.set(TOUCHED.get() + 1);
}

fn touched(act: impl FnOnce()) -> usize {
    TOUCHED.set(0);
    act();
    TOUCHED.get()
}

/// A key or value that counts operations and cannot be cloned.
#[derive(Debug, Eq)]
struct Counted(u32);

impl PartialEq for Counted {
    fn eq(&self, other: &Self) -> bool {
        touch();
        self.0 == other.0
    }
}

impl Hash for Counted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        touch();
        self.0.hash(state);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Alike(u32);

impl Hash for Alike {
    fn hash<H: Hasher>(&self, state: &mut H) {
        0.hash(state);
    }
}

/// Counts the nodes not shared with an earlier clone.
fn own_nodes<K, V>(now: &Arc<Node<K, V>>, before: &Arc<Node<K, V>>) -> usize {
    if Arc::ptr_eq(now, before) {
        return 0;
    }
    match (&**now, &**before) {
        (Node::Branch(now), Node::Branch(before)) => {
            let below = now.iter().zip(before);
            1 + below
                .map(|(now, before)| own_nodes(now, before))
                .sum::<usize>()
        }
        (Node::Branch(now), Node::Leaf(_)) => 1 + now.len(),
        (Node::Leaf(_), _) => 1,
    }
}

fn counted(entries: u32) -> SharedMap<Counted, Counted> {
    (0..entries).map(|key| (Counted(key), Counted(0))).collect()
}

fn sorted<K: Clone + Ord, V: Clone>(map: &SharedMap<K, V>) -> BTreeMap<K, V> {
    map.iter()
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

#[test]
fn a_change_costs_a_map_of_ten_thousand_what_it_costs_one_of_ten() {
    for entries in [10, 1_000, 10_000] {
        let mut map = counted(entries);
        let before = map.clone();
        let cost = touched(|| assert!(map.insert(Counted(entries / 2), Counted(1))));
        assert!(cost <= 2 * (MAX_LEAF_ENTRIES + 2), "{entries}: {cost}");
        let own = own_nodes(&map.root, &before.root);
        assert!((1..=6).contains(&own), "{entries}: {own}");
        let cost = touched(|| {
            let found = Differences::of(&map, &before);
            assert_eq!((found.set.len(), found.removed.len()), (1, 0));
        });
        assert!(
            cost <= 4 * MAX_LEAF_ENTRIES * MAX_LEAF_ENTRIES,
            "{entries}: {cost}"
        );
        // Setting an equal value copies nothing.
        let same = map.clone();
        assert!(!map.insert(Counted(entries / 2), Counted(1)));
        assert!(Arc::ptr_eq(&map.root, &same.root));
    }
}

#[test]
fn a_removal_costs_a_map_of_ten_thousand_what_it_costs_one_of_ten() {
    for entries in [10, 1_000, 10_000] {
        let mut map = counted(entries);
        let before = map.clone();
        let cost = touched(|| assert!(map.remove(&Counted(entries / 2))));
        assert!(cost <= 2 * (MAX_LEAF_ENTRIES + 1), "{entries}: {cost}");
        let own = own_nodes(&map.root, &before.root);
        assert!((1..=6).contains(&own), "{entries}: {own}");
        let found = Differences::of(&map, &before);
        assert_eq!((found.set.len(), found.removed.len()), (0, 1));
    }
}

#[test]
fn a_copy_stays_as_it_was() {
    let mut map: SharedMap<_, _> = (0..100).map(|key| (key, key)).collect();
    let before = map.clone();
    for key in 0..200 {
        map.insert(key, 7);
    }
    for key in 0..50 {
        map.remove(&key);
    }
    assert_eq!(sorted(&before), (0..100).map(|key| (key, key)).collect());
    assert_eq!(sorted(&map), (50..200).map(|key| (key, 7)).collect());
    assert_eq!((before.len(), map.len()), (100, 150));
}

#[test]
fn it_does_what_an_ordinary_map_does() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut map, mut ordinary) = (SharedMap::new(), BTreeMap::new());
    for round in 0..20_000_u32 {
        let key = random.u32(..2_000);
        // The map grows at first and shrinks later.
        if random.u32(..20_000) < round {
            assert_eq!(map.remove(&key), ordinary.remove(&key).is_some());
        } else {
            let value = random.u32(..4);
            let is_new = map.insert(key, value);
            assert_eq!(is_new, ordinary.insert(key, value) != Some(value));
        }
        assert_eq!(map.get(&key), ordinary.get(&key));
        assert_eq!(map.len(), ordinary.len());
    }
    assert_eq!(sorted(&map), ordinary);
    for key in ordinary.keys() {
        assert!(map.remove(key));
    }
    assert!(map.is_empty());
    assert!(matches!(&*map.root, Node::Leaf(entries) if entries.is_empty()));
}

#[test]
fn the_differences_of_two_copies_are_what_was_set_changed_or_removed() {
    let before: SharedMap<u32, u32> = (0..1_000).map(|key| (key, key)).collect();
    let mut now = before.clone();
    now.insert(3, 0);
    now.insert(2_000, 0);
    now.remove(&4);
    // A reverted change is no difference.
    now.insert(5, 0);
    now.insert(5, 5);
    let mut found = now.differences(&before);
    found.sort_unstable();
    assert_eq!(found, [3, 4, 2_000]);
    found = SharedMap::new().differences(&before);
    assert_eq!(found.len(), 1_000);
    found = before.differences(&SharedMap::new());
    assert_eq!(found.len(), 1_000);
}

#[test]
fn equal_entries_stay_shared_in_an_update() {
    let before: SharedMap<u32, u32> = (0..1_000).map(|key| (key, key)).collect();
    let mut other: SharedMap<u32, u32> = (0..1_000).rev().map(|key| (key, key)).collect();
    let mut now = before.clone();
    assert!(!now.update_to(&other));
    assert!(Arc::ptr_eq(&now.root, &before.root));
    other.insert(1, 0);
    other.remove(&2);
    assert!(now.update_to(&other));
    assert_eq!(now, other);
    assert!(own_nodes(&now.root, &before.root) <= 12);
}

#[test]
fn keys_with_equal_hashes_are_distinguished() {
    let mut map: SharedMap<_, _> = (0..100).map(|key| (Alike(key), key)).collect();
    assert_eq!((map.len(), map.get(&Alike(42))), (100, Some(&42)));
    let before = map.clone();
    assert!(map.remove(&Alike(42)));
    assert_eq!(map.get(&Alike(42)), None);
    assert_eq!(map.differences(&before), [Alike(42)]);
}
