//! Limits concurrent connections, in total and per key.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

#[derive(Debug)]
pub struct ConnectionLimit<K: Ord> {
    max: usize,
    max_per_key: usize,
    taken: Mutex<BTreeMap<K, usize>>,
}

impl<K: Ord + Clone> ConnectionLimit<K> {
    pub fn new(max: usize, max_per_key: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            max_per_key,
            taken: Mutex::default(),
        })
    }

    /// Returns a permit, which counts until dropped, or `None` if a limit is reached.
    pub fn try_acquire(self: &Arc<Self>, key: K) -> Option<ConnectionPermit<K>> {
        let mut taken = self.lock();
        let (all, same) = (
            taken.values().sum::<usize>(),
            taken.get(&key).copied().unwrap_or_default(),
        );
        if all >= self.max || same >= self.max_per_key {
            return None;
        }
        taken.insert(key.clone(), same + 1);
        Some(ConnectionPermit {
            limit: Arc::clone(self),
            key,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub struct ConnectionPermit<K: Ord + Clone> {
    limit: Arc<ConnectionLimit<K>>,
    key: K,
}

impl<K: Ord + Clone> Drop for ConnectionPermit<K> {
    fn drop(&mut self) {
        let mut taken = self.limit.lock();
        let left = taken.remove(&self.key).unwrap_or_default();
        if left > 1 {
            taken.insert(self.key.clone(), left - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_key_cannot_take_what_is_reserved_for_the_others() {
        let limit = ConnectionLimit::new(4, 2);
        let storm: Vec<_> = (0..1000)
            .filter_map(|_| limit.try_acquire("storm"))
            .collect();
        assert_eq!(storm.len(), 2);
        let ztunnel = limit.try_acquire("ztunnel").unwrap();
        drop(ztunnel);
        limit.try_acquire("ztunnel").unwrap();
    }

    #[test]
    fn the_total_is_limited_and_a_dropped_permit_is_free_again() {
        let limit = ConnectionLimit::new(3, 2);
        let mut taken: Vec<_> = (0..9).filter_map(|key| limit.try_acquire(key)).collect();
        assert_eq!(taken.len(), 3);
        assert!(limit.try_acquire(9).is_none());
        taken.pop();
        let again = limit.try_acquire(9).unwrap();
        assert!(limit.try_acquire(9).is_none());
        drop((again, taken));
        assert!(limit.lock().is_empty());
    }
}
