//! The last word on sandboxes that are gone: a delayed call must not bring one back.

use std::collections::BTreeMap;

use inpod_types::{Revision, SandboxRef};

/// How many removed sandboxes are remembered. A node runs a few hundred pods, and a call is delayed by seconds.
const REMEMBERED: usize = 4096;

/// The revisions at which sandboxes were removed, the oldest forgotten first.
#[derive(Debug, Default)]
pub struct Tombstones {
    graves: BTreeMap<SandboxRef, (Revision, u64)>,
    by_age: BTreeMap<u64, SandboxRef>,
    buried: u64,
}

impl Tombstones {
    /// The revision at which the sandbox was removed last.
    pub fn get(&self, sandbox: &SandboxRef) -> Option<Revision> {
        self.graves.get(sandbox).map(|(revision, _)| *revision)
    }

    /// Remembers a removal.
    pub fn bury(&mut self, sandbox: SandboxRef, revision: Revision) {
        self.buried += 1;
        let grave = (revision, self.buried);
        if let Some((_, age)) = self.graves.insert(sandbox.clone(), grave) {
            self.by_age.remove(&age);
        }
        self.by_age.insert(self.buried, sandbox);
        if self.by_age.len() > REMEMBERED
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.graves.remove(&oldest);
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
        for n in 0..=REMEMBERED {
            tombstones.bury(sandbox(&format!("c{n}")), Revision(1));
        }
        assert_eq!(tombstones.get(&sandbox("c0")), None);
        assert_eq!(tombstones.get(&sandbox("c1")), Some(Revision(1)));
        assert_eq!(tombstones.graves.len(), tombstones.by_age.len());
    }

    #[test]
    fn a_repeated_removal_takes_one_place() {
        let mut tombstones = Tombstones::default();
        for revision in 1..=3 {
            tombstones.bury(sandbox("c"), Revision(revision));
        }
        assert_eq!(tombstones.get(&sandbox("c")), Some(Revision(3)));
        assert_eq!(tombstones.by_age.len(), 1);
    }
}
