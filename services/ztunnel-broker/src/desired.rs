//! Which workloads the ztunnels are to serve, and which word on each sandbox is the last.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use workload::{NetnsId, PodUid, Revision, SandboxRef, Workload};

use crate::{descriptors::Descriptor, tombstone::Tombstones};

/// The pods whose state may have changed, each with the sandbox that the word was about.
pub type Changes = BTreeMap<PodUid, SandboxRef>;

/// Why a word on a sandbox is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Nothing may be added to or removed from a set that is not known.
    #[error("the desired set is not known yet")]
    NotSeeded,
    /// The word is older than what is known.
    #[error("revision {} of the sandbox is known", .known.0)]
    Stale {
        /// The last word.
        known: Revision,
    },
}

/// A desired workload, with the descriptor of its netns once that has been fetched.
#[derive(Clone, Debug)]
pub struct Entry {
    workload: Workload,
    descriptor: Option<Descriptor>,
    arrival: u64,
}

impl Entry {
    /// The workload.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Its netns's descriptor, if it is held.
    pub fn descriptor(&self) -> Option<&Descriptor> {
        self.descriptor.as_ref()
    }
}

/// The desired set. Its key is the sandbox; of several sandboxes of one pod, the one with the highest revision is
/// what ztunnel, whose key is the pod's UID, is told.
#[derive(Debug, Default)]
pub struct Desired {
    /// `None` until the first set; then until when a snapshot waits for descriptors.
    patience: Option<Instant>,
    entries: BTreeMap<SandboxRef, Entry>,
    by_uid: BTreeMap<PodUid, BTreeSet<SandboxRef>>,
    tombstones: Tombstones,
    arrivals: u64,
}

impl Desired {
    /// Whether the set is known. Before, nobody is told anything.
    pub fn is_seeded(&self) -> bool {
        self.patience.is_some()
    }

    /// Whether a snapshot may make do without the descriptors that are missing: when none is, or when the fetching
    /// had its chance. A fresh ztunnel can do nothing with a Keep.
    pub fn may_keep(&self, now: Instant) -> bool {
        self.patience.is_some_and(|until| until <= now) || self.missing().next().is_none()
    }

    /// Until when a snapshot waits for missing descriptors.
    pub fn patience(&self) -> Option<Instant> {
        self.patience
    }

    /// Replaces the set, but for sandboxes on which a later word is known. What was known of a netns stays known:
    /// a sandbox never changes it.
    pub fn set(&mut self, revision: Revision, all: Vec<Workload>, patience: Instant) -> Changes {
        self.patience.get_or_insert(patience);
        let named: BTreeSet<_> = all.iter().map(|w| w.sandbox.clone()).collect();
        let mut changes = Changes::new();
        for sandbox in self.missing_from(&named, revision) {
            changes.extend(self.take(&sandbox));
            self.tombstones.bury(sandbox, revision);
        }
        for workload in all {
            if self.check(&workload.sandbox, workload.revision).is_ok() {
                self.learn(workload, &mut changes);
            }
        }
        changes
    }

    fn missing_from(&self, named: &BTreeSet<SandboxRef>, revision: Revision) -> Vec<SandboxRef> {
        self.entries
            .iter()
            .filter(|(sandbox, entry)| {
                !named.contains(sandbox) && entry.workload.revision <= revision
            })
            .map(|(sandbox, _)| sandbox.clone())
            .collect()
    }

    fn learn(&mut self, mut workload: Workload, changes: &mut Changes) {
        let known = self.entries.get(&workload.sandbox);
        let known = known.filter(|known| known.workload.uid == workload.uid);
        let learnt = || known.and_then(|known| known.workload.netns);
        workload.netns = workload.netns.or_else(learnt);
        if known.is_some_and(|known| known.workload == workload) {
            return;
        }
        let descriptor = known.and_then(|known| known.descriptor.clone());
        let descriptor = descriptor.filter(|held| Some(held.netns()) == workload.netns);
        changes.extend(self.put(workload, descriptor));
    }

    /// Takes a workload in and returns what stood in its place.
    ///
    /// # Errors
    ///
    /// When the set is not known yet, or a later word on the sandbox or on its pod is.
    pub fn add(
        &mut self,
        workload: Workload,
        descriptor: Descriptor,
    ) -> Result<(Option<Entry>, Changes), ChangeError> {
        self.admit(&workload)?;
        let previous = self.entries.get(&workload.sandbox).cloned();
        let changes = self.put(workload, Some(descriptor));
        Ok((previous, changes))
    }

    /// Whether [`Self::add`] would take the workload in.
    ///
    /// # Errors
    ///
    /// When it would not.
    pub fn admit(&self, workload: &Workload) -> Result<(), ChangeError> {
        self.check_seeded()?;
        self.check(&workload.sandbox, workload.revision)?;
        match self.current(&workload.uid) {
            Some(newer) if newer.workload.revision > workload.revision => Err(ChangeError::Stale {
                known: newer.workload.revision,
            }),
            Some(_) | None => Ok(()),
        }
    }

    /// Removes a workload; its descriptor is closed.
    ///
    /// # Errors
    ///
    /// When the set is not known yet, or a later word on the sandbox is.
    pub fn remove(
        &mut self,
        sandbox: &SandboxRef,
        revision: Revision,
    ) -> Result<Changes, ChangeError> {
        self.check_seeded()?;
        self.check(sandbox, revision)?;
        let changes = self.take(sandbox);
        self.tombstones.bury(sandbox.clone(), revision);
        Ok(changes)
    }

    /// Puts back what stood in a workload's place before [`Self::add`].
    pub fn restore(&mut self, sandbox: &SandboxRef, previous: Option<Entry>) -> Changes {
        let mut changes = self.take(sandbox);
        if let Some(entry) = previous {
            changes.extend(self.put(entry.workload, entry.descriptor));
        }
        changes
    }

    /// Keeps a descriptor that has been fetched, if it is the one that the workload still lacks.
    pub fn store(&mut self, sandbox: &SandboxRef, descriptor: Descriptor) -> Changes {
        match self.entries.get_mut(sandbox) {
            Some(entry) if entry.lacks() == Some(descriptor.netns()) => {
                entry.descriptor = Some(descriptor);
                Changes::from([(entry.workload.uid.clone(), sandbox.clone())])
            }
            Some(_) | None => Changes::new(),
        }
    }

    /// The workloads whose netns is known and whose descriptor is not held.
    pub fn missing(&self) -> impl Iterator<Item = (&SandboxRef, NetnsId)> {
        let lacking = |(sandbox, entry): (_, &Entry)| Some((sandbox, entry.lacks()?));
        self.entries.iter().filter_map(lacking)
    }

    /// The workload of that sandbox.
    pub fn get(&self, sandbox: &SandboxRef) -> Option<&Entry> {
        self.entries.get(sandbox)
    }

    /// What ztunnels are to be told of that pod.
    pub fn current(&self, uid: &PodUid) -> Option<&Entry> {
        let sandboxes = self.by_uid.get(uid)?;
        let entries = sandboxes.iter().filter_map(|it| self.entries.get(it));
        entries.max_by_key(|entry| (entry.workload.revision, entry.arrival))
    }

    /// The pods, in order.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.by_uid.keys()
    }

    /// The workloads, by sandbox.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    fn check_seeded(&self) -> Result<(), ChangeError> {
        self.patience.map(|_| ()).ok_or(ChangeError::NotSeeded)
    }

    /// A word of the same revision is a repetition, not a later one.
    fn check(&self, sandbox: &SandboxRef, revision: Revision) -> Result<(), ChangeError> {
        let entry = self.entries.get(sandbox);
        let known = entry
            .map(|entry| entry.workload.revision)
            .max(self.tombstones.get(sandbox));
        match known {
            Some(known) if known > revision => Err(ChangeError::Stale { known }),
            Some(_) | None => Ok(()),
        }
    }

    fn put(&mut self, workload: Workload, descriptor: Option<Descriptor>) -> Changes {
        let sandbox = workload.sandbox.clone();
        let mut changes = self.take(&sandbox);
        changes.insert(workload.uid.clone(), sandbox.clone());
        let sandboxes = self.by_uid.entry(workload.uid.clone()).or_default();
        sandboxes.insert(sandbox.clone());
        self.arrivals += 1;
        let entry = Entry {
            workload,
            descriptor,
            arrival: self.arrivals,
        };
        self.entries.insert(sandbox, entry);
        changes
    }

    fn take(&mut self, sandbox: &SandboxRef) -> Changes {
        let Some(entry) = self.entries.remove(sandbox) else {
            return Changes::new();
        };
        let uid = entry.workload.uid;
        if let Some(sandboxes) = self.by_uid.get_mut(&uid) {
            sandboxes.remove(sandbox);
            if sandboxes.is_empty() {
                self.by_uid.remove(&uid);
            }
        }
        Changes::from([(uid, sandbox.clone())])
    }
}

impl Entry {
    fn lacks(&self) -> Option<NetnsId> {
        self.workload.netns.filter(|_| self.descriptor.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{descriptor, sandbox, uid, workload};

    fn seeded(all: Vec<Workload>) -> Desired {
        let mut desired = Desired::default();
        let highest = all.iter().map(|w| w.revision).max().unwrap_or_default();
        desired.set(highest, all, Instant::now());
        desired
    }

    fn holds(desired: &Desired) -> Vec<&str> {
        let ids = desired
            .entries()
            .map(|e| &e.workload().sandbox.container_id);
        ids.map(workload::ContainerId::as_str).collect()
    }

    fn add(desired: &mut Desired, it: Workload) -> Result<(), ChangeError> {
        let inode = it.netns.unwrap().inode;
        desired.add(it, descriptor(inode)).map(|_| ())
    }

    #[test]
    fn nothing_can_be_added_or_removed_before_the_set_is_known() {
        let mut desired = Desired::default();
        let added = add(&mut desired, workload("c1", "p", 1, 1));
        assert_eq!(added, Err(ChangeError::NotSeeded));
        let removed = desired.remove(&sandbox("c1"), Revision(1));
        assert_eq!(removed, Err(ChangeError::NotSeeded));
    }

    #[test]
    fn a_set_replaces_what_it_does_not_name() {
        let mut desired = seeded(vec![workload("c1", "p", 1, 1), workload("c2", "q", 2, 2)]);
        desired.set(Revision(3), vec![workload("c2", "q", 2, 2)], Instant::now());
        assert_eq!(holds(&desired), ["c2"]);
    }

    #[test]
    fn a_set_does_not_take_back_a_later_add() {
        let mut desired = seeded(vec![]);
        add(&mut desired, workload("c1", "p", 1, 9)).unwrap();
        desired.set(Revision(8), vec![], Instant::now());
        assert_eq!(holds(&desired), ["c1"]);
    }

    #[test]
    fn a_set_does_not_bring_back_what_was_removed_later() {
        let mut desired = seeded(vec![workload("c1", "p", 1, 1)]);
        desired.remove(&sandbox("c1"), Revision(2)).unwrap();
        desired.set(Revision(1), vec![workload("c1", "p", 1, 1)], Instant::now());
        assert!(holds(&desired).is_empty());
    }

    #[test]
    fn an_older_add_or_remove_is_stale() {
        let mut desired = seeded(vec![workload("c1", "p", 1, 5)]);
        let stale = ChangeError::Stale { known: Revision(5) };
        let added = add(&mut desired, workload("c1", "p", 1, 4));
        assert_eq!(added, Err(stale.clone()));
        let removed = desired.remove(&sandbox("c1"), Revision(4));
        assert_eq!(removed, Err(stale));
    }

    #[test]
    fn an_add_that_was_overtaken_by_the_removal_is_stale() {
        let mut desired = seeded(vec![]);
        desired.remove(&sandbox("c1"), Revision(2)).unwrap();
        let added = add(&mut desired, workload("c1", "p", 1, 1));
        assert_eq!(added, Err(ChangeError::Stale { known: Revision(2) }));
    }

    #[test]
    fn the_removal_of_an_old_sandbox_leaves_the_pod_to_the_new_one() {
        let mut desired = seeded(vec![workload("old", "p", 1, 1)]);
        add(&mut desired, workload("new", "p", 2, 2)).unwrap();
        desired.remove(&sandbox("old"), Revision(3)).unwrap();
        let current = desired.current(&uid("p")).unwrap();
        assert_eq!(current.workload().sandbox, sandbox("new"));
    }

    #[test]
    fn an_old_sandbox_cannot_take_its_pod_back() {
        let mut desired = seeded(vec![workload("new", "p", 2, 2)]);
        let added = add(&mut desired, workload("old", "p", 1, 1));
        assert_eq!(added, Err(ChangeError::Stale { known: Revision(2) }));
    }

    #[test]
    fn a_set_without_the_netns_does_not_unlearn_it() {
        let mut desired = seeded(vec![]);
        add(&mut desired, workload("c1", "p", 1, 1)).unwrap();
        let changes = desired.set(Revision(1), vec![workload("c1", "p", 0, 1)], Instant::now());
        assert!(changes.is_empty(), "{changes:?}");
        assert!(desired.current(&uid("p")).unwrap().descriptor().is_some());
    }

    #[test]
    fn a_descriptor_of_another_netns_is_not_kept() {
        let mut desired = seeded(vec![workload("c1", "p", 1, 1)]);
        assert!(desired.store(&sandbox("c1"), descriptor(2)).is_empty());
        assert_eq!(desired.missing().count(), 1);
        assert_eq!(desired.store(&sandbox("c1"), descriptor(1)).len(), 1);
        assert_eq!(desired.missing().count(), 0);
    }

    #[test]
    fn restoring_puts_the_earlier_netns_back() {
        let mut desired = seeded(vec![]);
        add(&mut desired, workload("c1", "p", 1, 1)).unwrap();
        let (previous, _) = desired
            .add(workload("c1", "p", 2, 2), descriptor(2))
            .unwrap();
        desired.restore(&sandbox("c1"), previous);
        let current = desired.current(&uid("p")).unwrap();
        assert_eq!(current.descriptor().unwrap().netns().inode, 1);
    }
}
