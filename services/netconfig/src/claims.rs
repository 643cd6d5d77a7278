//! Which netns is held for which sandbox, and what was last seen in it. The one place where a netns gets a name that
//! callers may use.

mod path_watcher;
pub(crate) mod sweep;
pub(crate) mod validate;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use inpod_linux::Netns;
use inpod_types::{NetnsId, SandboxRef};
use tokio::sync::broadcast;

use crate::{apply::Observation, error::ClaimError, inspect, notifications::Queue};
use validate::ValidatedNetns;

/// How many events a slow watcher may lag behind before it has to read everything again.
const EVENT_BACKLOG: usize = 1024;

/// A validated netns, held for a sandbox.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: Netns,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) since: SystemTime,
    /// Held by whoever changes the netns, so that changes of one netns come one after another.
    pub(crate) change_lock: Arc<tokio::sync::Mutex<()>>,
}

/// What was seen in a claimed netns.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: NetnsId,
    pub(crate) observation: Observation,
    /// Grows with everything that is published of any claim.
    pub(crate) revision: u64,
}

/// A claim that ended.
#[derive(Clone, Debug)]
pub(crate) struct Released {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: NetnsId,
    /// As of [`State`].
    pub(crate) revision: u64,
}

/// What happened to a claim. Names it only: an event that waits for a slow watcher must not hold a netns.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// It is new, or was found at another path.
    Claimed(SandboxRef),
    /// What is in its netns is not what was published last.
    State(Arc<State>),
    /// It ended.
    Released(Released),
}

/// The claims held.
#[derive(Debug)]
pub(crate) struct Claims {
    table: Mutex<Table>,
    events: broadcast::Sender<Event>,
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Table {
    held: BTreeMap<SandboxRef, Held>,
    revision: u64,
}

#[derive(Debug)]
struct Held {
    claim: Arc<Claim>,
    /// What was published of it last.
    published: Option<Arc<State>>,
}

impl Table {
    fn next_revision(&mut self) -> u64 {
        self.revision = self.revision.saturating_add(1);
        self.revision
    }

    /// Of the same netns: a claim that was confirmed at another path has not ended.
    fn current(&mut self, claim: &Claim) -> Option<&mut Held> {
        let held = self.held.get_mut(&claim.sandbox);
        held.filter(|held| held.claim.netns.same_as(&claim.netns))
    }
}

impl Claims {
    /// None yet. Those that come are put into the queue of netns that are read.
    pub(crate) fn new(queue: Arc<Queue>) -> Self {
        Self {
            table: Mutex::default(),
            events: broadcast::Sender::new(EVENT_BACKLOG),
            queue,
        }
    }

    /// Holds a validated netns for a sandbox. One that the sandbox holds already is confirmed; another one takes its
    /// place only when it is gone.
    ///
    /// May look through the node's processes, and hence block.
    pub(crate) fn claim(
        &self,
        sandbox: &SandboxRef,
        validated: ValidatedNetns,
    ) -> Result<Arc<Claim>, ClaimError> {
        if let Some(held) = self.find(sandbox) {
            if held.netns.same_as(&validated.netns) {
                return self.confirm(held, validated);
            }
            if !is_gone(&held) {
                return Err(ClaimError::Held {
                    held: held.netns.id(),
                    found: validated.netns.id(),
                });
            }
            self.release(&held);
        }
        self.insert(sandbox, validated)
    }

    /// Where the path that it was claimed at is gone, the claim goes on at the one that it was found at now.
    fn confirm(
        &self,
        held: Arc<Claim>,
        validated: ValidatedNetns,
    ) -> Result<Arc<Claim>, ClaimError> {
        if held.netns.path_intact() {
            return Ok(held);
        }
        let mut table = self.lock();
        let Some(current) = table.current(&held) else {
            drop(table);
            // It ended since it was found.
            return self.insert(&held.sandbox, validated);
        };
        let claim = Arc::new(Claim {
            sandbox: held.sandbox.clone(),
            netns: validated.netns,
            addresses: validated.addresses,
            since: held.since,
            change_lock: Arc::clone(&held.change_lock),
        });
        current.claim = Arc::clone(&claim);
        self.send_event(Event::Claimed(claim.sandbox.clone()));
        Ok(claim)
    }

    fn insert(
        &self,
        sandbox: &SandboxRef,
        validated: ValidatedNetns,
    ) -> Result<Arc<Claim>, ClaimError> {
        let mut table = self.lock();
        let found = validated.netns.id();
        // Who else has it: another sandbox, or this one by a call that was existing.
        let mut others = table.held.values().map(|held| &held.claim);
        if let Some(other) = others.find(|claim| claim.netns.id() == found) {
            return if other.sandbox == *sandbox {
                Ok(Arc::clone(other))
            } else {
                let other = other.sandbox.clone();
                Err(ClaimError::InUse { found, other })
            };
        }
        if let Some(existing) = table.held.get(sandbox) {
            let held = existing.claim.netns.id();
            return Err(ClaimError::Held { held, found });
        }
        let claim = Arc::new(Claim {
            sandbox: sandbox.clone(),
            netns: validated.netns,
            addresses: validated.addresses,
            since: SystemTime::now(),
            change_lock: Arc::default(),
        });
        let held = Held {
            claim: Arc::clone(&claim),
            published: None,
        };
        table.held.insert(sandbox.clone(), held);
        self.queue.add(sandbox);
        self.send_event(Event::Claimed(sandbox.clone()));
        Ok(claim)
    }

    /// The claim of a sandbox.
    pub(crate) fn get(&self, sandbox: &SandboxRef) -> Result<Arc<Claim>, ClaimError> {
        self.find(sandbox)
            .ok_or_else(|| ClaimError::Unknown(sandbox.clone()))
    }

    /// The claim of a sandbox, if there is one.
    pub(crate) fn find(&self, sandbox: &SandboxRef) -> Option<Arc<Claim>> {
        let table = self.lock();
        table.held.get(sandbox).map(|held| Arc::clone(&held.claim))
    }

    /// All of them, ordered by sandbox.
    pub(crate) fn list(&self) -> Vec<Arc<Claim>> {
        let table = self.lock();
        let claims = table.held.values().map(|held| Arc::clone(&held.claim));
        claims.collect()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.lock().held.len()
    }

    /// Whether a claim has not ended.
    pub(crate) fn is_current(&self, claim: &Claim) -> bool {
        self.lock().current(claim).is_some()
    }

    /// Ends a claim, unless another netns has taken its place. Its descriptor is closed when the last call on it ends.
    pub(crate) fn release(&self, claim: &Claim) -> bool {
        let mut table = self.lock();
        if table.current(claim).is_none() {
            return false;
        }
        table.held.remove(&claim.sandbox);
        let netns = claim.netns.id();
        self.queue.remove(&claim.sandbox, netns);
        self.send_event(Event::Released(Released {
            sandbox: claim.sandbox.clone(),
            netns,
            revision: table.next_revision(),
        }));
        true
    }

    /// What is in a claim's netns was changed through it: it is read, and watchers are published, also where they were published
    /// the same before. What was mended and then broken again is another thing than what was never mended.
    pub(crate) fn republish(&self, claim: &Claim) {
        if let Some(held) = self.lock().current(claim) {
            held.published = None;
        }
        self.queue.mark_changed(&claim.sandbox);
    }

    /// What was seen in a claim's netns. Watchers are published where it is not what they were published last. Gives back what
    /// they know now, and whether it is new; `None` where the claim has ended.
    pub(crate) fn publish(
        &self,
        claim: &Claim,
        observation: Observation,
    ) -> Option<(Arc<State>, bool)> {
        let mut table = self.lock();
        let published = table.current(claim)?.published.clone();
        if let Some(published) = published.filter(|published| published.observation == observation)
        {
            return Some((published, false));
        }
        let state = Arc::new(State {
            sandbox: claim.sandbox.clone(),
            netns: claim.netns.id(),
            observation,
            revision: table.next_revision(),
        });
        table.current(claim)?.published = Some(Arc::clone(&state));
        self.send_event(Event::State(Arc::clone(&state)));
        Some((state, true))
    }

    /// What watchers were published of a claim's netns last.
    pub(crate) fn last_published(&self, claim: &Claim) -> Option<Arc<State>> {
        self.lock().current(claim)?.published.clone()
    }

    /// Whose claims there are, and every event from then on.
    pub(crate) fn subscribe(&self) -> (Vec<SandboxRef>, broadcast::Receiver<Event>) {
        let table = self.lock();
        let sandboxes = table.held.keys().cloned().collect();
        (sandboxes, self.events.subscribe())
    }

    fn send_event(&self, event: Event) {
        // An error says that nobody watches.
        drop(self.events.send(event));
    }

    /// A panic while it was held cannot have left it half changed: nothing that is called with it panics.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether nothing uses a netns but this process: its path does not lead to it, and no process is in it. Looks
/// through the node's processes in the worst case.
pub(crate) fn is_gone(claim: &Claim) -> bool {
    !claim.netns.path_intact() && !inspect::is_inhabited(&claim.netns)
}
