//! A map whose copies share what they have in common: a copy costs nothing, a change of a copy costs a few small nodes,
//! and what two copies differ in is found without a look at what they share.
//!
//! That is what a snapshot for each event needs: its cost does not grow with the map. It is a hash trie of our own,
//! since no crate with one (imbl) can be had where inpod is built.

use std::{
    array, fmt,
    hash::{DefaultHasher, Hash, Hasher as _},
    sync::Arc,
};

/// Bits of a hash that choose a child, and the children of a branch.
const BITS: u32 = 4;
const CHILDREN: usize = 1 << BITS;

/// Entries of a leaf, above which it becomes a branch.
const LEAF: usize = 16;

/// Branches on the way to a leaf after which a hash has no more bits: such a leaf takes any number.
const DEPTH: u32 = u64::BITS / BITS;

type Entry<K, V> = Arc<(K, V)>;

/// A map that is cheap to copy and to compare with its earlier copies. Iterates in no order that matters.
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

/// A key's hash, of which a step towards its leaf takes the lowest bits. The same in every map, so that two can be
/// compared.
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

    /// Which child, and the way from there.
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

    /// Whether there was none of this key.
    fn put(&mut self, path: Path, entry: Entry<K, V>) -> bool {
        match self {
            Self::Branch(children) => {
                let (child, rest) = path.step();
                let child = children.get_mut(child);
                child.is_some_and(|child| Arc::make_mut(child).put(rest, entry))
            }
            Self::Leaf(entries) => {
                if let Some(known) = entries.iter_mut().find(|known| known.0 == entry.0) {
                    *known = entry;
                    return false;
                }
                entries.push(entry);
                if entries.len() > LEAF && path.depth < DEPTH {
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

    /// Takes an entry out that is there.
    fn take(&mut self, path: Path, key: &K) {
        match self {
            Self::Leaf(entries) => entries.retain(|entry| entry.0 != *key),
            Self::Branch(children) => {
                let (child, rest) = path.step();
                if let Some(child) = children.get_mut(child) {
                    Arc::make_mut(child).take(rest, key);
                }
                if let Some(entries) = few(children) {
                    *self = Self::Leaf(entries);
                }
            }
        }
    }
}

/// The entries of leaves that are so empty that one does.
fn few<K, V>(children: &[Arc<Node<K, V>>]) -> Option<Vec<Entry<K, V>>> {
    let mut all = Vec::new();
    for child in children {
        match &**child {
            Node::Leaf(entries) if all.len() + entries.len() <= LEAF / 2 => {
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

/// What two maps differ in.
struct Differences<K, V> {
    /// Entries that the one has and the other lacks or has otherwise.
    set: Vec<Entry<K, V>>,
    /// Entries of the other whose key the one lacks.
    gone: Vec<Entry<K, V>>,
}

impl<K: Hash + Eq, V: PartialEq> Differences<K, V> {
    fn of(now: &SharedMap<K, V>, before: &SharedMap<K, V>) -> Self {
        let mut found = Self {
            set: Vec::new(),
            gone: Vec::new(),
        };
        found.look(&now.root, &before.root, 0);
        found
    }

    fn look(&mut self, now: &Arc<Node<K, V>>, before: &Arc<Node<K, V>>, depth: u32) {
        if Arc::ptr_eq(now, before) {
            return;
        }
        if let (Node::Branch(now), Node::Branch(before)) = (&**now, &**before) {
            for (now, before) in now.iter().zip(before) {
                self.look(now, before, depth + 1);
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
                self.gone.push(Arc::clone(entry));
            }
        }
    }
}

impl<K, V> SharedMap<K, V> {
    /// An empty map.
    pub fn new() -> Self {
        Self {
            root: Arc::new(Node::Leaf(Vec::new())),
            len: 0,
        }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        entries(&self.root).map(|entry| (&entry.0, &entry.1))
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K: Hash + Eq, V> SharedMap<K, V> {
    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        let found = self.root.find(Path::of(key), key);
        found.map(|entry| &entry.1)
    }

    /// Whether there is a value of a key.
    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Removes a key. Whether it was there.
    pub fn remove(&mut self, key: &K) -> bool {
        let path = Path::of(key);
        if self.root.find(path, key).is_none() {
            return false;
        }
        Arc::make_mut(&mut self.root).take(path, key);
        self.len -= 1;
        true
    }

    fn put(&mut self, entry: Entry<K, V>) {
        let path = Path::of(&entry.0);
        if Arc::make_mut(&mut self.root).put(path, entry) {
            self.len += 1;
        }
    }
}

impl<K: Hash + Eq, V: PartialEq> SharedMap<K, V> {
    /// Gives a key a value. Whether that is another one than before; where it is not nothing is copied.
    pub fn insert(&mut self, key: K, value: V) -> bool {
        let is_new = self.get(&key) != Some(&value);
        if is_new {
            self.put(Arc::new((key, value)));
        }
        is_new
    }

    /// Takes over what another map says. What is the same stays shared with earlier copies. Whether anything was not.
    pub fn adopt(&mut self, other: &Self) -> bool {
        let Differences { set, gone } = Differences::of(other, self);
        let is_new = !set.is_empty() || !gone.is_empty();
        for entry in gone {
            self.remove(&entry.0);
        }
        for entry in set {
            self.put(entry);
        }
        is_new
    }
}

impl<K: Hash + Eq + Clone, V: PartialEq> SharedMap<K, V> {
    /// The keys whose value is not as it was in an earlier copy, or that are in only one of the two.
    pub fn differences(&self, before: &Self) -> Vec<K> {
        let Differences { set, gone } = Differences::of(self, before);
        let all = set.iter().chain(&gone);
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
        let Differences { set, gone } = Differences::of(self, other);
        set.is_empty() && gone.is_empty()
    }
}

impl<K: Hash + Eq, V: Eq> Eq for SharedMap<K, V> {}

impl<K: Hash + Eq, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(all: T) -> Self {
        let mut map = Self::new();
        for entry in all {
            map.put(Arc::new(entry));
        }
        map
    }
}

#[cfg(test)]
mod tests;
