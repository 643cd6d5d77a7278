//! A persistent map: clones are free and share their common parts, a change copies a few small nodes, and differences
//! are found without visiting shared parts.
//!
//! The map allows a snapshot per event at a cost that does not grow with the map. inpod has its own hash trie, because
//! no crate with such a map (imbl) is available where inpod is built.

use std::{
    array, fmt,
    hash::{DefaultHasher, Hash, Hasher as _},
    sync::Arc,
};

/// The bits of a hash that select a child of a branch.
const BITS: u32 = 4;
const CHILDREN: usize = 1 << BITS;

const MAX_LEAF_ENTRIES: usize = 16;

/// The depth at which a hash has no bits left; a leaf at this depth holds any number of entries.
const MAX_DEPTH: u32 = u64::BITS / BITS;

type Entry<K, V> = Arc<(K, V)>;

/// A map that is cheap to clone and to compare with earlier clones. The iteration order is unspecified.
pub struct SharedMap<K, V> {
    root: Arc<Node<K, V>>,
    len: usize,
}

enum Node<K, V> {
    Leaf(Vec<Entry<K, V>>),
    Branch([Arc<Self>; CHILDREN]),
}

impl<K, V> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::Leaf(entries) => Self::Leaf(entries.clone()),
            Self::Branch(children) => Self::Branch(children.clone()),
        }
    }
}

/// A key's hash, whose lowest bits select the next child. A key has the same hash in every map, so that maps are
/// comparable.
#[derive(Clone, Copy)]
struct Path {
    rest: u64,
    depth: u32,
}

impl Path {
    fn of(key: &impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        Self {
            rest: hasher.finish(),
            depth: 0,
        }
    }

    fn to_depth(self, depth: u32) -> Self {
        Self {
            rest: self.rest.checked_shr(depth * BITS).unwrap_or_default(),
            depth,
        }
    }

    fn step(self) -> (usize, Self) {
        let child = self.rest % (1 << BITS);
        let next = Self {
            rest: self.rest >> BITS,
            depth: self.depth + 1,
        };
        (usize::try_from(child).unwrap_or_default(), next)
    }
}

impl<K: Hash + Eq, V> Node<K, V> {
    fn find(&self, path: Path, key: &K) -> Option<&Entry<K, V>> {
        match self {
            Self::Leaf(entries) => entries.iter().find(|entry| entry.0 == *key),
            Self::Branch(children) => {
                let (child, rest) = path.step();
                children.get(child)?.find(rest, key)
            }
        }
    }

    /// Inserts an entry. Returns whether the key is new.
    fn insert_entry(&mut self, path: Path, entry: Entry<K, V>) -> bool {
        match self {
            Self::Branch(children) => {
                let (child, rest) = path.step();
                let child = children.get_mut(child);
                child.is_some_and(|child| Arc::make_mut(child).insert_entry(rest, entry))
            }
            Self::Leaf(entries) => {
                if let Some(known) = entries.iter_mut().find(|known| known.0 == entry.0) {
                    *known = entry;
                    return false;
                }
                entries.push(entry);
                if entries.len() > MAX_LEAF_ENTRIES && path.depth < MAX_DEPTH {
                    *self = Self::split(std::mem::take(entries), path.depth);
                }
                true
            }
        }
    }

    fn split(entries: Vec<Entry<K, V>>, depth: u32) -> Self {
        let mut children = array::from_fn(|_| Vec::new());
        for entry in entries {
            let (child, _) = Path::of(&entry.0).to_depth(depth).step();
            if let Some(child) = children.get_mut(child) {
                child.push(entry);
            }
        }
        Self::Branch(children.map(|entries| Arc::new(Self::Leaf(entries))))
    }

    /// Removes an entry, which must exist.
    fn remove_entry(&mut self, path: Path, key: &K) {
        match self {
            Self::Leaf(entries) => entries.retain(|entry| entry.0 != *key),
            Self::Branch(children) => {
                let (child, rest) = path.step();
                if let Some(child) = children.get_mut(child) {
                    Arc::make_mut(child).remove_entry(rest, key);
                }
                if let Some(entries) = merge_small_leaves(children) {
                    *self = Self::Leaf(entries);
                }
            }
        }
    }
}

/// Returns the entries of all children if the entries fill at most half a leaf.
fn merge_small_leaves<K, V>(children: &[Arc<Node<K, V>>]) -> Option<Vec<Entry<K, V>>> {
    let mut all = Vec::new();
    for child in children {
        match &**child {
            Node::Leaf(entries) if all.len() + entries.len() <= MAX_LEAF_ENTRIES / 2 => {
                all.extend(entries.iter().cloned());
            }
            Node::Leaf(_) | Node::Branch(_) => return None,
        }
    }
    Some(all)
}

fn entries<K, V>(node: &Node<K, V>) -> impl Iterator<Item = &Entry<K, V>> {
    let mut nodes = vec![node];
    let leaves = std::iter::from_fn(move || {
        loop {
            match nodes.pop()? {
                Node::Leaf(entries) => return Some(entries),
                Node::Branch(children) => nodes.extend(children.iter().map(|child| &**child)),
            }
        }
    });
    leaves.flatten()
}

struct Differences<K, V> {
    /// Entries that are new or changed in the first map.
    set: Vec<Entry<K, V>>,
    /// Entries whose key the first map lacks.
    removed: Vec<Entry<K, V>>,
}

impl<K: Hash + Eq, V: PartialEq> Differences<K, V> {
    fn of(now: &SharedMap<K, V>, before: &SharedMap<K, V>) -> Self {
        let mut found = Self {
            set: Vec::new(),
            removed: Vec::new(),
        };
        found.compare(&now.root, &before.root, 0);
        found
    }

    fn compare(&mut self, now: &Arc<Node<K, V>>, before: &Arc<Node<K, V>>, depth: u32) {
        if Arc::ptr_eq(now, before) {
            return;
        }
        if let (Node::Branch(now), Node::Branch(before)) = (&**now, &**before) {
            for (now, before) in now.iter().zip(before) {
                self.compare(now, before, depth + 1);
            }
            return;
        }
        let path = |key: &K| Path::of(key).to_depth(depth);
        for entry in entries(now) {
            let known = before.find(path(&entry.0), &entry.0);
            let is_same = |known: &Entry<K, V>| Arc::ptr_eq(known, entry) || known.1 == entry.1;
            if !known.is_some_and(is_same) {
                self.set.push(Arc::clone(entry));
            }
        }
        for entry in entries(before) {
            if now.find(path(&entry.0), &entry.0).is_none() {
                self.removed.push(Arc::clone(entry));
            }
        }
    }
}

impl<K, V> SharedMap<K, V> {
    pub fn new() -> Self {
        Self {
            root: Arc::new(Node::Leaf(Vec::new())),
            len: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        entries(&self.root).map(|entry| (&entry.0, &entry.1))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K: Hash + Eq, V> SharedMap<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        let found = self.root.find(Path::of(key), key);
        found.map(|entry| &entry.1)
    }

    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    pub fn remove(&mut self, key: &K) -> bool {
        let path = Path::of(key);
        if self.root.find(path, key).is_none() {
            return false;
        }
        Arc::make_mut(&mut self.root).remove_entry(path, key);
        self.len -= 1;
        true
    }

    fn insert_entry(&mut self, entry: Entry<K, V>) {
        let path = Path::of(&entry.0);
        if Arc::make_mut(&mut self.root).insert_entry(path, entry) {
            self.len += 1;
        }
    }
}

impl<K: Hash + Eq, V: PartialEq> SharedMap<K, V> {
    /// Inserts a value. Returns whether the value differs from before; an equal value copies nothing.
    pub fn insert(&mut self, key: K, value: V) -> bool {
        let is_new = self.get(&key) != Some(&value);
        if is_new {
            self.insert_entry(Arc::new((key, value)));
        }
        is_new
    }

    /// Takes over the content of another map; equal entries stay shared. Returns whether anything changed.
    pub fn update_to(&mut self, other: &Self) -> bool {
        let Differences { set, removed } = Differences::of(other, self);
        let is_new = !set.is_empty() || !removed.is_empty();
        for entry in removed {
            self.remove(&entry.0);
        }
        for entry in set {
            self.insert_entry(entry);
        }
        is_new
    }
}

impl<K: Hash + Eq + Clone, V: PartialEq> SharedMap<K, V> {
    /// Returns the keys whose value differs from an earlier clone, and the keys present in only one of the two maps.
    pub fn differences(&self, before: &Self) -> Vec<K> {
        let Differences { set, removed } = Differences::of(self, before);
        let all = set.iter().chain(&removed);
        all.map(|entry| entry.0.clone()).collect()
    }
}

impl<K, V> Clone for SharedMap<K, V> {
    fn clone(&self) -> Self {
        Self {
            root: Arc::clone(&self.root),
            len: self.len,
        }
    }
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Hash + Eq, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        let Differences { set, removed } = Differences::of(self, other);
        set.is_empty() && removed.is_empty()
    }
}

impl<K: Hash + Eq, V: Eq> Eq for SharedMap<K, V> {}

impl<K: Hash + Eq, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(all: T) -> Self {
        let mut map = Self::new();
        for entry in all {
            map.insert_entry(Arc::new(entry));
        }
        map
    }
}

#[cfg(test)]
mod tests;
