//! Which netns is held for which sandbox, and what was last seen in it. The one place where a netns gets a name that
//! callers may use.

mod paths;
pub(crate) mod proof;
pub(crate) mod sweep;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use inpod_linux::Netns;
use inpod_types::{NetnsId, SandboxRef};
use tokio::sync::broadcast;

use crate::{apply::Observation, error::ClaimError, events::Queue, inspect};
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

/// What was seen in a claimed netns.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: NetnsId,
    pub(crate) observation: Observation,
    /// Grows with everything that is told of any claim.
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
    Placed(SandboxRef),
    /// What is in its netns is not what was told last.
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
    /// What was told of it last.
    told: Option<Arc<State>>,
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
            events: broadcast::Sender::new(BACKLOG),
            queue,
        }
    }

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
                return self.confirm(held, proven);
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
    fn confirm(&self, held: Arc<Claim>, proven: Proven) -> Result<Arc<Claim>, ClaimError> {
        if held.netns.path_intact() {
            return Ok(held);
        }
        let mut table = self.lock();
        let Some(current) = table.current(&held) else {
            drop(table);
            // It ended since it was found.
            return self.insert(&held.sandbox, proven);
        };
        let claim = Arc::new(Claim {
            sandbox: held.sandbox.clone(),
            netns: proven.netns,
            addresses: proven.addresses,
            since: held.since,
            turn: Arc::clone(&held.turn),
        });
        current.claim = Arc::clone(&claim);
        self.announce(Event::Placed(claim.sandbox.clone()));
        Ok(claim)
    }

    fn insert(&self, sandbox: &SandboxRef, proven: Proven) -> Result<Arc<Claim>, ClaimError> {
        let mut table = self.lock();
        let found = proven.netns.id();
        // Who else has it: another sandbox, or this one by a call that was faster.
        let mut others = table.held.values().map(|held| &held.claim);
        if let Some(other) = others.find(|claim| claim.netns.id() == found) {
            return if other.sandbox == *sandbox {
                Ok(Arc::clone(other))
            } else {
                let other = other.sandbox.clone();
                Err(ClaimError::InUse { found, other })
            };
        }
        if let Some(faster) = table.held.get(sandbox) {
            let held = faster.claim.netns.id();
            return Err(ClaimError::Held { held, found });
        }
        let claim = Arc::new(Claim {
            sandbox: sandbox.clone(),
            netns: proven.netns,
            addresses: proven.addresses,
            since: SystemTime::now(),
            turn: Arc::default(),
        });
        let held = Held {
            claim: Arc::clone(&claim),
            told: None,
        };
        table.held.insert(sandbox.clone(), held);
        self.queue.add(sandbox);
        self.announce(Event::Placed(sandbox.clone()));
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
        self.announce(Event::Released(Released {
            sandbox: claim.sandbox.clone(),
            netns,
            revision: table.next_revision(),
        }));
        true
    }

    /// What is in a claim's netns was changed through it: it is read, and watchers are told, also where they were told
    /// the same before. What was mended and then broken again is another thing than what was never mended.
    pub(crate) fn touched(&self, claim: &Claim) {
        if let Some(held) = self.lock().current(claim) {
            held.told = None;
        }
        self.queue.mark(&claim.sandbox);
    }

    /// What was seen in a claim's netns. Watchers are told where it is not what they were told last. Gives back what
    /// they know now, and whether it is new; `None` where the claim has ended.
    pub(crate) fn tell(
        &self,
        claim: &Claim,
        observation: Observation,
    ) -> Option<(Arc<State>, bool)> {
        let mut table = self.lock();
        let told = table.current(claim)?.told.clone();
        if let Some(told) = told.filter(|told| told.observation == observation) {
            return Some((told, false));
        }
        let state = Arc::new(State {
            sandbox: claim.sandbox.clone(),
            netns: claim.netns.id(),
            observation,
            revision: table.next_revision(),
        });
        table.current(claim)?.told = Some(Arc::clone(&state));
        self.announce(Event::State(Arc::clone(&state)));
        Some((state, true))
    }

    /// What watchers were told of a claim's netns last.
    pub(crate) fn told(&self, claim: &Claim) -> Option<Arc<State>> {
        self.lock().current(claim)?.told.clone()
    }

    /// Whose claims there are, and every event from then on.
    pub(crate) fn subscribe(&self) -> (Vec<SandboxRef>, broadcast::Receiver<Event>) {
        let table = self.lock();
        let sandboxes = table.held.keys().cloned().collect();
        (sandboxes, self.events.subscribe())
    }

    fn announce(&self, event: Event) {
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
    !claim.netns.path_intact() && !inspect::has_processes(&claim.netns)
}
