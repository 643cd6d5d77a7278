//! The desired workloads, and each sandbox's newest revision.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use inpod_types::{NetnsId, PodUid, Revision, SandboxRef, Workload};

use crate::{descriptors::Descriptor, tombstone::Tombstones};

/// The time for which the first snapshots wait for descriptors. After a restart of all services, netconfig can hand
/// over the descriptors within moments, and a fresh ztunnel can do nothing with a Keep.
const FETCH_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The pods whose state may have changed, each with the sandbox concerned.
pub type Changes = BTreeMap<PodUid, SandboxRef>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Workloads can only be added to or removed from a known set.
    #[error("the desired set is not known yet")]
    NotSeeded,
    #[error("revision {} of the sandbox is known", .known.0)]
    Stale { known: Revision },
}

/// A desired workload, with its descriptor once fetched.
#[derive(Clone, Debug)]
pub struct Entry {
    workload: Workload,
    descriptor: Option<Descriptor>,
    arrival: u64,
    since: Instant,
}

impl Entry {
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    pub fn since(&self) -> Instant {
        self.since
    }

    pub fn descriptor(&self) -> Option<&Descriptor> {
        self.descriptor.as_ref()
    }
}

/// The desired set, keyed by sandbox. ztunnel's key is the pod's UID: among several sandboxes, ztunnel receives the
/// sandbox with the highest revision.
#[derive(Debug, Default)]
pub struct Desired {
    /// The time until which snapshots wait for descriptors; `None` until the first set.
    fetch_deadline: Option<Instant>,
    entries: BTreeMap<SandboxRef, Entry>,
    by_uid: BTreeMap<PodUid, BTreeSet<SandboxRef>>,
    /// Sandboxes with a known netns and without a descriptor. The set is small, and searched after every change.
    missing_descriptors: BTreeSet<SandboxRef>,
    tombstones: Tombstones,
    arrivals: u64,
}

impl Desired {
    /// Returns whether the set is known. The broker sends ztunnels nothing before the set is known.
    pub fn is_seeded(&self) -> bool {
        self.fetch_deadline.is_some()
    }

    /// Returns whether a snapshot may use Keep for pods without a descriptor: no descriptor is missing, or the time for
    /// fetching is over.
    pub fn may_keep(&self, now: Instant) -> bool {
        self.fetch_deadline.is_some_and(|until| until <= now) || self.missing().next().is_none()
    }

    pub fn fetch_deadline(&self) -> Option<Instant> {
        self.fetch_deadline
    }

    /// Replaces the set, except for sandboxes with a newer revision. A known netns is retained: a sandbox
    /// never changes its netns.
    pub fn set(&mut self, revision: Revision, all: Vec<Workload>, now: Instant) -> Changes {
        self.fetch_deadline.get_or_insert(now + FETCH_GRACE_PERIOD);
        let named: BTreeSet<_> = all.iter().map(|w| w.sandbox.clone()).collect();
        let mut changes = Changes::new();
        for sandbox in self.missing_from(&named, revision) {
            changes.extend(self.remove_entry(&sandbox));
            self.tombstones.insert(sandbox, revision);
        }
        for workload in all {
            if self
                .check_revision(&workload.sandbox, workload.revision)
                .is_ok()
            {
                self.update_from_set(workload, &mut changes, now);
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

    fn update_from_set(&mut self, mut workload: Workload, changes: &mut Changes, now: Instant) {
        let known = self.entries.get(&workload.sandbox);
        let known = known.filter(|known| known.workload.uid == workload.uid);
        let learnt = || known.and_then(|known| known.workload.netns);
        workload.netns = workload.netns.or_else(learnt);
        if known.is_some_and(|known| known.workload == workload) {
            return;
        }
        let descriptor = known.and_then(|known| known.descriptor.clone());
        let descriptor = descriptor.filter(|held| Some(held.netns()) == workload.netns);
        changes.extend(self.insert_entry(workload, descriptor, now));
    }

    /// Adds a workload. Repeating an add only completes its descriptor.
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision of the sandbox or its pod is known.
    pub fn add(
        &mut self,
        workload: Workload,
        descriptor: Descriptor,
        now: Instant,
    ) -> Result<Changes, ChangeError> {
        self.check_add(&workload)?;
        match self.entries.get(&workload.sandbox) {
            Some(known) if known.workload == workload => {
                Ok(self.store(&workload.sandbox, descriptor))
            }
            Some(_) | None => Ok(self.insert_entry(workload, Some(descriptor), now)),
        }
    }

    pub fn check_add(&self, workload: &Workload) -> Result<(), ChangeError> {
        self.check_seeded()?;
        self.check_revision(&workload.sandbox, workload.revision)?;
        match self.current(&workload.uid) {
            Some(newer) if newer.workload.revision > workload.revision => Err(ChangeError::Stale {
                known: newer.workload.revision,
            }),
            Some(_) | None => Ok(()),
        }
    }

    /// Removes a workload and closes its descriptor.
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision of the sandbox is known.
    pub fn remove(
        &mut self,
        sandbox: &SandboxRef,
        revision: Revision,
    ) -> Result<Changes, ChangeError> {
        self.check_seeded()?;
        self.check_revision(sandbox, revision)?;
        let changes = self.remove_entry(sandbox);
        self.tombstones.insert(sandbox.clone(), revision);
        Ok(changes)
    }

    /// Stores a fetched descriptor if the workload still needs the descriptor.
    pub fn store(&mut self, sandbox: &SandboxRef, descriptor: Descriptor) -> Changes {
        match self.entries.get_mut(sandbox) {
            Some(entry) if entry.missing_descriptor() == Some(descriptor.netns()) => {
                entry.descriptor = Some(descriptor);
                self.missing_descriptors.remove(sandbox);
                Changes::from([(entry.workload.uid.clone(), sandbox.clone())])
            }
            Some(_) | None => Changes::new(),
        }
    }

    /// Returns the workloads with a known netns and without a descriptor.
    pub fn missing(&self) -> impl Iterator<Item = (&SandboxRef, NetnsId)> {
        let missing = |sandbox| {
            self.entries
                .get(sandbox)?
                .missing_descriptor()
                .map(|it| (sandbox, it))
        };
        self.missing_descriptors.iter().filter_map(missing)
    }

    pub fn get(&self, sandbox: &SandboxRef) -> Option<&Entry> {
        self.entries.get(sandbox)
    }

    /// Returns the workload that ztunnels have to serve for the pod.
    pub fn current(&self, uid: &PodUid) -> Option<&Entry> {
        let sandboxes = self.by_uid.get(uid)?;
        let entries = sandboxes.iter().filter_map(|it| self.entries.get(it));
        entries.max_by_key(|entry| (entry.workload.revision, entry.arrival))
    }

    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.by_uid.keys()
    }

    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    fn check_seeded(&self) -> Result<(), ChangeError> {
        self.fetch_deadline
            .map(|_| ())
            .ok_or(ChangeError::NotSeeded)
    }

    /// Checks that no newer revision is known. An equal revision is a repetition, not an older change.
    fn check_revision(&self, sandbox: &SandboxRef, revision: Revision) -> Result<(), ChangeError> {
        let entry = self.entries.get(sandbox);
        let known = entry
            .map(|entry| entry.workload.revision)
            .max(self.tombstones.get(sandbox));
        match known {
            Some(known) if known > revision => Err(ChangeError::Stale { known }),
            Some(_) | None => Ok(()),
        }
    }

    fn insert_entry(
        &mut self,
        workload: Workload,
        descriptor: Option<Descriptor>,
        since: Instant,
    ) -> Changes {
        let sandbox = workload.sandbox.clone();
        let mut changes = self.remove_entry(&sandbox);
        changes.insert(workload.uid.clone(), sandbox.clone());
        let sandboxes = self.by_uid.entry(workload.uid.clone()).or_default();
        sandboxes.insert(sandbox.clone());
        self.arrivals += 1;
        let entry = Entry {
            workload,
            descriptor,
            arrival: self.arrivals,
            since,
        };
        if entry.missing_descriptor().is_some() {
            self.missing_descriptors.insert(sandbox.clone());
        }
        self.entries.insert(sandbox, entry);
        changes
    }

    fn remove_entry(&mut self, sandbox: &SandboxRef) -> Changes {
        let Some(entry) = self.entries.remove(sandbox) else {
            return Changes::new();
        };
        self.missing_descriptors.remove(sandbox);
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
    fn missing_descriptor(&self) -> Option<NetnsId> {
        self.workload.netns.filter(|_| self.descriptor.is_none())
    }
}

#[cfg(test)]
mod tests;
