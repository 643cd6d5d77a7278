//! Which netns is held for which sandbox. The one place where a netns gets a name that callers may use.

pub(crate) mod proof;
pub(crate) mod sweep;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use netns::Netns;
use tokio::sync::broadcast;
use workload::{NetnsId, SandboxRef};

use crate::{error::ClaimError, inspect};
use proof::Proven;

/// How many events a slow watcher may lag behind before it has to read everything again.
const BACKLOG: usize = 1024;

/// A proven netns, held for a sandbox.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: Netns,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) since: SystemTime,
    /// Held by whoever changes the netns, so that changes of one netns come one after another.
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
}

/// What happened to a claim. Names it only: an event that waits for a slow watcher must not hold a netns.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// It is new, or what is in its netns was changed through it.
    Changed(SandboxRef),
    /// It ended.
    Released(SandboxRef, NetnsId),
}

/// The claims held.
#[derive(Debug)]
pub(crate) struct Claims {
    table: Mutex<BTreeMap<SandboxRef, Arc<Claim>>>,
    events: broadcast::Sender<Event>,
}

impl Default for Claims {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            events: broadcast::Sender::new(BACKLOG),
        }
    }
}

impl Claims {
    /// Holds a proven netns for a sandbox. One that the sandbox holds already is confirmed; another one takes its
    /// place only when it is gone.
    ///
    /// May look through the node's processes, and hence block.
    pub(crate) fn claim(
        &self,
        sandbox: &SandboxRef,
        proven: Proven,
    ) -> Result<Arc<Claim>, ClaimError> {
        if let Some(held) = self.find(sandbox) {
            if held.netns.same_as(&proven.netns) {
                return Ok(self.confirm(held, proven));
            }
            if !is_gone(&held) {
                return Err(ClaimError::Held {
                    held: held.netns.id(),
                    found: proven.netns.id(),
                });
            }
            self.release(&held);
        }
        self.insert(sandbox, proven)
    }

    /// Where the path that it was claimed at is gone, the claim goes on at the one that it was found at now.
    fn confirm(&self, held: Arc<Claim>, proven: Proven) -> Arc<Claim> {
        if held.netns.path_intact() {
            return held;
        }
        let claim = Arc::new(Claim {
            sandbox: held.sandbox.clone(),
            netns: proven.netns,
            addresses: proven.addresses,
            since: held.since,
            turn: Arc::clone(&held.turn),
        });
        self.lock().insert(held.sandbox.clone(), Arc::clone(&claim));
        claim
    }

    fn insert(&self, sandbox: &SandboxRef, proven: Proven) -> Result<Arc<Claim>, ClaimError> {
        let mut table = self.lock();
        let found = proven.netns.id();
        // Who else has it: another sandbox, or this one by a call that was faster.
        if let Some(other) = table.values().find(|claim| claim.netns.id() == found) {
            return if other.sandbox == *sandbox {
                Ok(Arc::clone(other))
            } else {
                let other = other.sandbox.clone();
                Err(ClaimError::InUse { found, other })
            };
        }
        if let Some(faster) = table.get(sandbox) {
            let held = faster.netns.id();
            return Err(ClaimError::Held { held, found });
        }
        let claim = Arc::new(Claim {
            sandbox: sandbox.clone(),
            netns: proven.netns,
            addresses: proven.addresses,
            since: SystemTime::now(),
            turn: Arc::default(),
        });
        table.insert(sandbox.clone(), Arc::clone(&claim));
        self.announce(Event::Changed(sandbox.clone()));
        Ok(claim)
    }

    /// The claim of a sandbox.
    pub(crate) fn get(&self, sandbox: &SandboxRef) -> Result<Arc<Claim>, ClaimError> {
        self.find(sandbox)
            .ok_or_else(|| ClaimError::Unknown(sandbox.clone()))
    }

    /// The claim of a sandbox, if there is one.
    pub(crate) fn find(&self, sandbox: &SandboxRef) -> Option<Arc<Claim>> {
        self.lock().get(sandbox).map(Arc::clone)
    }

    /// All of them, ordered by sandbox.
    pub(crate) fn list(&self) -> Vec<Arc<Claim>> {
        self.lock().values().map(Arc::clone).collect()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Whether a claim has not ended.
    pub(crate) fn is_current(&self, claim: &Claim) -> bool {
        let found = self.find(&claim.sandbox);
        found.is_some_and(|found| found.netns.same_as(&claim.netns))
    }

    /// Ends a claim, unless another netns has taken its place. Its descriptor is closed when the last call on it ends.
    pub(crate) fn release(&self, claim: &Claim) -> bool {
        let mut table = self.lock();
        let found = table.get(&claim.sandbox);
        let current = found.is_some_and(|found| found.netns.same_as(&claim.netns));
        if current {
            table.remove(&claim.sandbox);
            self.announce(Event::Released(claim.sandbox.clone(), claim.netns.id()));
        }
        current
    }

    /// Tells watchers that what is in a claim's netns may have changed.
    pub(crate) fn touched(&self, claim: &Claim) {
        self.announce(Event::Changed(claim.sandbox.clone()));
    }

    /// Whose claims there are, and every event from then on.
    pub(crate) fn subscribe(&self) -> (Vec<SandboxRef>, broadcast::Receiver<Event>) {
        let table = self.lock();
        (table.keys().cloned().collect(), self.events.subscribe())
    }

    fn announce(&self, event: Event) {
        // An error says that nobody watches.
        drop(self.events.send(event));
    }

    /// A panic while it was held cannot have left it half changed: every change is one call of the map.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxRef, Arc<Claim>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether nothing uses a netns but this process: its path does not lead to it, and no process is in it. Looks
/// through the node's processes in the worst case.
pub(crate) fn is_gone(claim: &Claim) -> bool {
    !claim.netns.path_intact() && !inspect::is_inhabited(&claim.netns)
}
