//! How many connections may be in one state at once, in all and of one kind each.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// So many places, of which one kind takes a part at most.
#[derive(Debug)]
pub struct Places<K: Ord> {
    most: usize,
    most_of_one: usize,
    taken: Mutex<BTreeMap<K, usize>>,
}

impl<K: Ord + Clone> Places<K> {
    /// `most` places in all, `most_of_one` for one kind.
    pub fn new(most: usize, most_of_one: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_of_one,
            taken: Mutex::default(),
        })
    }

    /// Takes a place until the value goes; `None` where there is none left.
    pub fn take(self: &Arc<Self>, kind: K) -> Option<Place<K>> {
        let mut taken = self.lock();
        let (all, same) = (
            taken.values().sum::<usize>(),
            taken.get(&kind).copied().unwrap_or_default(),
        );
        if all >= self.most || same >= self.most_of_one {
            return None;
        }
        taken.insert(kind.clone(), same + 1);
        Some(Place {
            places: Arc::clone(self),
            kind,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place that is taken.
#[derive(Debug)]
pub struct Place<K: Ord + Clone> {
    places: Arc<Places<K>>,
    kind: K,
}

impl<K: Ord + Clone> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        let left = taken.remove(&self.kind).unwrap_or_default();
        if left > 1 {
            taken.insert(self.kind.clone(), left - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_cannot_take_what_is_kept_for_the_others() {
        let places = Places::new(4, 2);
        let storm: Vec<_> = (0..1000).filter_map(|_| places.take("storm")).collect();
        assert_eq!(storm.len(), 2);
        let ztunnel = places.take("ztunnel").unwrap();
        drop(ztunnel);
        places.take("ztunnel").unwrap();
    }

    #[test]
    fn there_are_no_more_than_all_and_a_place_that_goes_is_free() {
        let places = Places::new(3, 2);
        let mut taken: Vec<_> = (0..9).filter_map(|kind| places.take(kind)).collect();
        assert_eq!(taken.len(), 3);
        assert!(places.take(9).is_none());
        taken.pop();
        let again = places.take(9).unwrap();
        assert!(places.take(9).is_none());
        drop((again, taken));
        assert!(places.lock().is_empty());
    }
}
