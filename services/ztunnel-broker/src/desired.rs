//! The desired workloads, and the newest revision of each removed sandbox.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use inpod_types::{Failure, NetnsId, PodUid, Reason, Revision, SandboxRef, Workload};

use crate::descriptors::Descriptor;

/// The time for which the first snapshots wait for descriptors. After a restart of all services, netconfig can hand
/// over the descriptors within moments, and a fresh ztunnel can do nothing with a Keep.
const FETCH_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// A node runs a few hundred pods, and calls are delayed by seconds.
const MAX_TOMBSTONES: usize = 4096;

/// A desired workload, with its descriptor once fetched.
#[derive(Clone, Debug)]
pub struct Entry {
    pub workload: Workload,
    pub descriptor: Option<Descriptor>,
    /// The time since which the workload is known in this form.
    pub since: Instant,
}

impl Entry {
    /// Returns the netns whose descriptor is to be fetched.
    fn missing_descriptor(&self) -> Option<NetnsId> {
        self.workload.netns.filter(|_| self.descriptor.is_none())
    }
}

/// The desired set.
#[derive(Debug, Default)]
pub struct Desired {
    /// The time until which snapshots wait for descriptors; `None` until the first set.
    fetch_deadline: Option<Instant>,
    /// The sandboxes of each pod by ascending revision, never empty. ztunnel's key is the pod's UID, so ztunnel receives
    /// only the last sandbox.
    pods: BTreeMap<PodUid, Vec<Entry>>,
    /// The pod of each sandbox.
    pod_of: BTreeMap<SandboxRef, PodUid>,
    /// The sandboxes with a known netns and without a descriptor.
    missing: BTreeSet<SandboxRef>,
    tombstones: Tombstones,
}

/// The revisions at which sandboxes were removed, so that no delayed call brings a removed sandbox back.
#[derive(Debug, Default)]
struct Tombstones {
    revisions: BTreeMap<SandboxRef, Revision>,
    oldest_first: BTreeSet<(Revision, SandboxRef)>,
}

impl Tombstones {
    fn get(&self, sandbox: &SandboxRef) -> Option<Revision> {
        self.revisions.get(sandbox).copied()
    }

    fn insert(&mut self, sandbox: &SandboxRef, revision: Revision) {
        if let Some(before) = self.revisions.insert(sandbox.clone(), revision) {
            self.oldest_first.remove(&(before, sandbox.clone()));
        }
        self.oldest_first.insert((revision, sandbox.clone()));
        if self.revisions.len() > MAX_TOMBSTONES {
            let oldest = self.oldest_first.pop_first();
            oldest.map(|(_, sandbox)| self.revisions.remove(&sandbox));
        }
    }
}

impl Desired {
    /// Returns whether the set is known. The broker sends ztunnels nothing before the set is known.
    pub fn is_seeded(&self) -> bool {
        self.fetch_deadline.is_some()
    }

    /// Returns whether a snapshot may use Keep for pods without a descriptor: no descriptor is missing, or the time for
    /// fetching is over.
    pub fn may_keep(&self, now: Instant) -> bool {
        self.fetch_deadline.is_some_and(|until| until <= now) || self.missing.is_empty()
    }

    pub fn fetch_deadline(&self) -> Option<Instant> {
        self.fetch_deadline
    }

    /// Replaces the set, except for sandboxes with a newer revision. A known netns is retained: a sandbox never changes
    /// its netns. Returns the pods that may have changed.
    pub fn set(
        &mut self,
        revision: Revision,
        all: Vec<Workload>,
        now: Instant,
    ) -> BTreeSet<PodUid> {
        self.fetch_deadline.get_or_insert(now + FETCH_GRACE_PERIOD);
        let named: BTreeSet<_> = all.iter().map(|workload| &workload.sandbox).collect();
        let known = self.entries().map(|entry| &entry.workload);
        let is_dropped = |it: &&Workload| !named.contains(&it.sandbox) && it.revision <= revision;
        let dropped: Vec<_> = known.filter(is_dropped).cloned().collect();
        let mut changed = BTreeSet::new();
        for workload in dropped {
            self.drop_sandbox(&workload.sandbox, revision);
            changed.insert(workload.uid);
        }
        for workload in all {
            // A sandbox may have belonged to another pod.
            changed.extend(self.pod_of.get(&workload.sandbox).cloned());
            changed.insert(workload.uid.clone());
            if self.check_revision(&workload).is_ok() {
                self.replace_named(workload, now);
            }
        }
        changed
    }

    fn replace_named(&mut self, mut workload: Workload, now: Instant) {
        let known = self.take(&workload.sandbox);
        let known = known.filter(|known| known.workload.uid == workload.uid);
        let learnt = known.as_ref().and_then(|known| known.workload.netns);
        workload.netns = workload.netns.or(learnt);
        let same = known.as_ref().filter(|known| known.workload == workload);
        let since = same.map_or(now, |known| known.since);
        let held = known.and_then(|known| known.descriptor);
        self.put(Entry {
            descriptor: held.filter(|held| Some(held.netns()) == workload.netns),
            workload,
            since,
        });
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
    ) -> Result<(), Failure> {
        self.check_add(&workload)?;
        let known = self.take(&workload.sandbox);
        let same = known.filter(|known| known.workload == workload);
        self.put(Entry {
            workload,
            descriptor: Some(descriptor),
            since: same.map_or(now, |known| known.since),
        });
        Ok(())
    }

    /// Checks that the set is known, and no newer revision of the sandbox or its pod.
    pub fn check_add(&self, workload: &Workload) -> Result<(), Failure> {
        self.check_seeded()?;
        self.check_revision(workload)?;
        let current = self.current(&workload.uid);
        let current = current.map(|current| current.workload.revision);
        check_newest(current, workload.revision)
    }

    /// Removes a workload and closes its descriptor.
    ///
    /// # Errors
    ///
    /// If the set is not known yet, or a newer revision of the sandbox is known.
    pub fn remove(&mut self, sandbox: &SandboxRef, revision: Revision) -> Result<(), Failure> {
        self.check_seeded()?;
        check_newest(self.revision_of(sandbox), revision)?;
        self.drop_sandbox(sandbox, revision);
        Ok(())
    }

    /// Stores a fetched descriptor if the workload still needs the descriptor. Returns the pod of the workload.
    pub fn store(&mut self, sandbox: &SandboxRef, descriptor: Descriptor) -> Option<PodUid> {
        let uid = self.pod_of.get(sandbox)?;
        let mut sandboxes = self.pods.get_mut(uid)?.iter_mut();
        let entry = sandboxes.find(|it| it.workload.sandbox == *sandbox)?;
        if entry.missing_descriptor() != Some(descriptor.netns()) {
            return None;
        }
        entry.descriptor = Some(descriptor);
        self.missing.remove(sandbox);
        Some(uid.clone())
    }

    /// Returns the workloads with a known netns and without a descriptor.
    pub fn missing(&self) -> impl Iterator<Item = (&SandboxRef, NetnsId)> {
        let missing = self.missing.iter();
        missing.filter_map(|it| Some((it, self.get(it)?.missing_descriptor()?)))
    }

    pub fn get(&self, sandbox: &SandboxRef) -> Option<&Entry> {
        let sandboxes = self.pods.get(self.pod_of.get(sandbox)?)?;
        sandboxes.iter().find(|it| it.workload.sandbox == *sandbox)
    }

    /// Returns the workload that ztunnels have to serve for the pod.
    pub fn current(&self, uid: &PodUid) -> Option<&Entry> {
        self.pods.get(uid)?.last()
    }

    /// Returns each pod with the workload that ztunnels have to serve.
    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, &Entry)> {
        let pods = self.pods.iter();
        pods.filter_map(|(uid, entries)| Some((uid, visit(entries.last()?))))
    }

    /// Returns all sandboxes, including replaced sandboxes of a pod.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.pods.values().flatten().map(visit)
    }

    fn check_seeded(&self) -> Result<(), Failure> {
        let unknown = || Failure::new(Reason::NotSeeded, "the desired set is not known yet");
        self.fetch_deadline.map(|_| ()).ok_or_else(unknown)
    }

    fn check_revision(&self, workload: &Workload) -> Result<(), Failure> {
        check_newest(self.revision_of(&workload.sandbox), workload.revision)
    }

    fn revision_of(&self, sandbox: &SandboxRef) -> Option<Revision> {
        let held = self.get(sandbox).map(|entry| entry.workload.revision);
        held.max(self.tombstones.get(sandbox))
    }

    fn put(&mut self, entry: Entry) {
        let (sandbox, uid) = (&entry.workload.sandbox, &entry.workload.uid);
        if entry.missing_descriptor().is_some() {
            self.missing.insert(sandbox.clone());
        }
        self.pod_of.insert(sandbox.clone(), uid.clone());
        let sandboxes = self.pods.entry(entry.workload.uid.clone()).or_default();
        sandboxes.push(entry);
        sandboxes.sort_by_key(|entry| entry.workload.revision);
    }

    fn take(&mut self, sandbox: &SandboxRef) -> Option<Entry> {
        let uid = self.pod_of.remove(sandbox)?;
        self.missing.remove(sandbox);
        let sandboxes = self.pods.get_mut(&uid)?;
        let mut taken = sandboxes.extract_if(.., |entry| entry.workload.sandbox == *sandbox);
        let entry = taken.next();
        drop(taken);
        if sandboxes.is_empty() {
            self.pods.remove(&uid);
        }
        entry
    }

    fn drop_sandbox(&mut self, sandbox: &SandboxRef, revision: Revision) {
        self.take(sandbox);
        self.tombstones.insert(sandbox, revision);
    }
}

/// Counts an entry of a pass over all entries, for the tests of the cost of a message.
fn visit(entry: &Entry) -> &Entry {
    #[cfg(test)]
    crate::fixture::count_step();
    entry
}

/// Checks that no newer revision is known. An equal revision is a repetition, not an older change.
fn check_newest(known: Option<Revision>, revision: Revision) -> Result<(), Failure> {
    match known {
        Some(known) if known > revision => {
            let message = format!("revision {} of the sandbox is known", known.0);
            Err(Failure::new(Reason::RevisionStale, message))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
