//! Remembers removed sandboxes, so that no delayed call brings a removed sandbox back.

use std::collections::BTreeMap;

use inpod_types::{Revision, SandboxRef};

/// A node runs a few hundred pods, and calls are delayed by seconds.
const MAX_TOMBSTONES: usize = 4096;

/// The revisions at which sandboxes were removed; the oldest is dropped first.
#[derive(Debug, Default)]
pub struct Tombstones {
    revisions: BTreeMap<SandboxRef, (Revision, u64)>,
    by_age: BTreeMap<u64, SandboxRef>,
    inserted: u64,
}

impl Tombstones {
    pub fn get(&self, sandbox: &SandboxRef) -> Option<Revision> {
        self.revisions.get(sandbox).map(|(revision, _)| *revision)
    }

    pub fn insert(&mut self, sandbox: SandboxRef, revision: Revision) {
        self.inserted += 1;
        let entry = (revision, self.inserted);
        if let Some((_, age)) = self.revisions.insert(sandbox.clone(), entry) {
            self.by_age.remove(&age);
        }
        self.by_age.insert(self.inserted, sandbox);
        if self.by_age.len() > MAX_TOMBSTONES
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.revisions.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::sandbox;

    #[test]
    fn the_oldest_removal_is_forgotten_first() {
        let mut tombstones = Tombstones::default();
        for n in 0..=MAX_TOMBSTONES {
            tombstones.insert(sandbox(&format!("c{n}")), Revision(1));
        }
        assert_eq!(tombstones.get(&sandbox("c0")), None);
        assert_eq!(tombstones.get(&sandbox("c1")), Some(Revision(1)));
        assert_eq!(tombstones.revisions.len(), tombstones.by_age.len());
    }

    #[test]
    fn a_repeated_removal_takes_one_place() {
        let mut tombstones = Tombstones::default();
        for revision in 1..=3 {
            tombstones.insert(sandbox("c"), Revision(revision));
        }
        assert_eq!(tombstones.get(&sandbox("c")), Some(Revision(3)));
        assert_eq!(tombstones.by_age.len(), 1);
    }
}
