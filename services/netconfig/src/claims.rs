//! The claims record the netns held for each sandbox, and its last published state. Callers refer to a netns by
//! sandbox only.

mod loopback_grace;
mod path_watcher;
pub(crate) mod sweep;
pub(crate) mod validate;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use anyhow::anyhow;
use inpod_linux::Netns;
use inpod_types::{NetnsId, Reason, SandboxRef};
use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::{
    apply::Observation, conflicts::VerifiedListeners, error::Failed, inspect,
    netns_session::Prepared, read_queue::Queue,
};
use loopback_grace::LoopbackGrace;
use validate::ValidatedNetns;

/// The number of events by which a slow watcher may lag behind before it needs a new watch.
const EVENT_BACKLOG: usize = 1024;

/// A claimed network namespace.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: Netns,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) since: SystemTime,
    /// Held during each change and each read of the netns.
    pub(crate) change_lock: Arc<tokio::sync::Mutex<()>>,
    /// The sockets on ztunnel's ports without a holder in the pod.
    pub(crate) verified_listeners: VerifiedListeners,
    /// The state read by the claim itself, under `change_lock`, for the operation that follows.
    prepared: Mutex<Option<Prepared>>,
    /// The probe addresses that the claim itself has set for announced rules.
    prepared_probes: Mutex<Option<BTreeSet<IpAddr>>>,
    loopback_grace: Mutex<LoopbackGrace>,
    /// The counter of UDP flows at the previous read; `None` before the first read.
    uncaptured_udp_flows: Mutex<Option<u64>>,
    /// True if no event reports the end of the netns, because its path vanished before its last process ended or
    /// lies in procfs.
    ends_unnoticed: AtomicBool,
}

impl Claim {
    fn new(
        sandbox: SandboxRef,
        validated: ValidatedNetns,
        since: SystemTime,
        change_lock: Arc<tokio::sync::Mutex<()>>,
    ) -> Self {
        Self {
            ends_unnoticed: validated.netns.path().starts_with(inspect::PROC).into(),
            sandbox,
            netns: validated.netns,
            addresses: validated.addresses,
            since,
            change_lock,
            verified_listeners: VerifiedListeners::default(),
            prepared: Mutex::default(),
            prepared_probes: Mutex::default(),
            loopback_grace: Mutex::default(),
            uncaptured_udp_flows: Mutex::default(),
        }
    }

    /// Returns how long to withhold a state that lacks what the kernel drops while `lo` is down.
    fn remaining_grace(&self, lacks_loopback: bool) -> Option<Duration> {
        let now = Instant::now();
        self.loopback_grace.lock().remaining(lacks_loopback, now)
    }

    /// Returns the UDP flows counted since the previous read; a lower counter belongs to rules written again. The first
    /// read counts none, because the rules may be older than this process, and an earlier run of netconfig has counted
    /// their flows.
    pub(crate) fn uncaptured_udp_since_last_read(&self, counter: u64) -> u64 {
        let previous = self.uncaptured_udp_flows.lock().replace(counter);
        previous.map_or(0, |it| counter.checked_sub(it).unwrap_or(counter))
    }

    pub(crate) fn set_prepared(&self, prepared: Prepared) {
        *self.prepared.lock() = Some(prepared);
    }

    pub(crate) fn take_prepared(&self) -> Option<Prepared> {
        self.prepared.lock().take()
    }

    pub(crate) fn set_prepared_probes(&self, addresses: BTreeSet<IpAddr>) {
        *self.prepared_probes.lock() = Some(addresses);
    }

    pub(crate) fn take_prepared_probes(&self) -> Option<BTreeSet<IpAddr>> {
        self.prepared_probes.lock().take()
    }

    fn ends_unnoticed(&self) -> bool {
        self.ends_unnoticed.load(Ordering::Relaxed)
    }

    fn drop_stale(&self) {
        self.prepared.lock().take_if(|prepared| prepared.is_stale());
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: NetnsId,
    pub(crate) observation: Observation,
    /// A number that increases with every event of any claim.
    pub(crate) revision: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Released {
    pub(crate) sandbox: SandboxRef,
    pub(crate) netns: NetnsId,
    pub(crate) revision: u64,
}

/// A change of claims, which holds names only because an event waiting for a slow watcher must not hold a netns
/// open.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// The claim is new, or its netns moved to another path.
    Claimed(SandboxRef),
    /// The state of the netns differs from the state published before.
    State(Arc<State>),
    Released(Released),
}

#[derive(Debug)]
pub(crate) struct Claims {
    table: Mutex<Table>,
    events: broadcast::Sender<Event>,
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Table {
    held: BTreeMap<SandboxRef, Held>,
    /// Maps each claimed netns to the sandbox holding the claim.
    sandboxes: HashMap<NetnsId, SandboxRef>,
    revision: u64,
}

#[derive(Debug)]
struct Held {
    claim: Arc<Claim>,
    /// The state published last; `None` before the first read.
    published: Option<Arc<State>>,
    /// True if the netns was read at least once since the claim.
    was_read: bool,
}

impl Table {
    fn next_revision(&mut self) -> u64 {
        self.revision = self.revision.saturating_add(1);
        self.revision
    }

    /// Returns the current entry of the claim's netns. Confirmation at another path does not end a claim.
    fn current(&mut self, claim: &Claim) -> Option<&mut Held> {
        let held = self.held.get_mut(&claim.sandbox);
        held.filter(|held| held.claim.netns.same_as(&claim.netns))
    }
}

impl Claims {
    /// Creates an empty table of claims. The `queue` receives every claim and has its netns read.
    pub(crate) fn new(queue: Arc<Queue>) -> Self {
        Self {
            table: Mutex::default(),
            events: broadcast::Sender::new(EVENT_BACKLOG),
            queue,
        }
    }

    /// Claims a validated netns for a sandbox. A claim of the same netns is confirmed; a claim of another netns is
    /// replaced only if the other netns is gone.
    ///
    /// Blocks while scanning the node's processes, which replacing a claim may require.
    pub(crate) fn claim(
        &self,
        sandbox: &SandboxRef,
        validated: ValidatedNetns,
    ) -> Result<Arc<Claim>, Failed> {
        if let Some(held) = self.find(sandbox) {
            if held.netns.same_as(&validated.netns) {
                return self.confirm(held, validated);
            }
            if !is_gone(&held) {
                return Err(held_error(held.netns.id(), validated.netns.id()));
            }
            self.release(&held);
        }
        self.insert(sandbox, validated)
    }

    /// Confirms a claim, and moves it to the validated path if the old path is gone.
    fn confirm(&self, held: Arc<Claim>, validated: ValidatedNetns) -> Result<Arc<Claim>, Failed> {
        if held.netns.path_intact() {
            return Ok(held);
        }
        let mut table = self.table.lock();
        let Some(current) = table.current(&held) else {
            drop(table);
            // Another task ended the claim after the lookup.
            return self.insert(&held.sandbox, validated);
        };
        let lock = Arc::clone(&held.change_lock);
        let claim = Claim::new(held.sandbox.clone(), validated, held.since, lock);
        let claim = Arc::new(claim);
        current.claim = Arc::clone(&claim);
        self.send_event(Event::Claimed(claim.sandbox.clone()));
        Ok(claim)
    }

    fn insert(
        &self,
        sandbox: &SandboxRef,
        validated: ValidatedNetns,
    ) -> Result<Arc<Claim>, Failed> {
        let mut table = self.table.lock();
        let found = validated.netns.id();
        // Another sandbox holds the netns, or a concurrent call has just claimed the netns for the same sandbox.
        if let Some(other) = table.sandboxes.get(&found) {
            return match table.held.get(sandbox) {
                Some(held) if other == sandbox => Ok(Arc::clone(&held.claim)),
                _ => {
                    let cause = anyhow!("{found} is claimed for sandbox {other}");
                    Err(Failed::new(Reason::NetnsInUse, cause).at_field("netns"))
                }
            };
        }
        if let Some(existing) = table.held.get(sandbox) {
            let held = existing.claim.netns.id();
            return Err(held_error(held, found));
        }
        let now = SystemTime::now();
        let claim = Arc::new(Claim::new(sandbox.clone(), validated, now, Arc::default()));
        let held = Held {
            claim: Arc::clone(&claim),
            published: None,
            was_read: false,
        };
        table.held.insert(sandbox.clone(), held);
        table.sandboxes.insert(found, sandbox.clone());
        self.queue.add(sandbox);
        self.send_event(Event::Claimed(sandbox.clone()));
        Ok(claim)
    }

    pub(crate) fn get(&self, sandbox: &SandboxRef) -> Result<Arc<Claim>, Failed> {
        self.find(sandbox).ok_or_else(|| unknown(sandbox))
    }

    pub(crate) fn find(&self, sandbox: &SandboxRef) -> Option<Arc<Claim>> {
        let table = self.table.lock();
        table.held.get(sandbox).map(|held| Arc::clone(&held.claim))
    }

    /// Returns all claims, ordered by sandbox.
    pub(crate) fn list(&self) -> Vec<Arc<Claim>> {
        let table = self.table.lock();
        let claims = table.held.values().map(|held| Arc::clone(&held.claim));
        claims.collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.table.lock().held.len()
    }

    /// Returns whether the claim still holds, which includes a claim confirmed at another path.
    pub(crate) fn is_current(&self, claim: &Claim) -> bool {
        self.table.lock().current(claim).is_some()
    }

    /// Ends a claim, unless another netns replaced the claimed one. The descriptor of the netns closes when the
    /// last running operation drops the claim.
    pub(crate) fn release(&self, claim: &Claim) -> bool {
        let mut table = self.table.lock();
        if table.current(claim).is_none() {
            return false;
        }
        table.held.remove(&claim.sandbox);
        let netns = claim.netns.id();
        table.sandboxes.remove(&netns);
        self.queue.remove(&claim.sandbox, netns);
        self.send_event(Event::Released(Released {
            sandbox: claim.sandbox.clone(),
            netns,
            revision: table.next_revision(),
        }));
        true
    }

    /// Makes the next state count as new even if it equals the previous state, so that a netns repaired and broken
    /// again is reported, unlike a netns never repaired.
    pub(crate) fn unpublish(&self, claim: &Claim) {
        if let Some(held) = self.table.lock().current(claim) {
            held.published = None;
        }
    }

    /// Publishes the state if it differs from the last published state. A state is withheld for a time, and read again
    /// after that time, while `lo` is down. The first state of a claim without rules is
    /// recorded, but causes no event. Returns the current state and whether an event was sent, or `None` if the
    /// claim has ended.
    pub(crate) fn publish(
        &self,
        claim: &Claim,
        observation: Observation,
    ) -> Option<(Arc<State>, bool)> {
        let withheld = claim.remaining_grace(observation.lacks_loopback);
        let mut table = self.table.lock();
        let held = table.current(claim)?;
        if let Some(wait) = withheld {
            self.queue.retry(&claim.sandbox, wait);
            return held.published.clone().map(|published| (published, false));
        }
        if let Some(published) = &held.published
            && published.observation == observation
        {
            return Some((Arc::clone(published), false));
        }
        let is_change =
            std::mem::replace(&mut held.was_read, true) || observation != Observation::default();
        let state = Arc::new(State {
            sandbox: claim.sandbox.clone(),
            netns: claim.netns.id(),
            observation,
            revision: table.next_revision(),
        });
        table.current(claim)?.published = Some(Arc::clone(&state));
        if is_change {
            self.send_event(Event::State(Arc::clone(&state)));
        }
        Some((state, is_change))
    }

    pub(crate) fn last_published(&self, claim: &Claim) -> Option<Arc<State>> {
        self.table.lock().current(claim)?.published.clone()
    }

    pub(crate) fn subscribe(&self) -> (Vec<SandboxRef>, broadcast::Receiver<Event>) {
        let table = self.table.lock();
        let sandboxes = table.held.keys().cloned().collect();
        (sandboxes, self.events.subscribe())
    }

    fn send_event(&self, event: Event) {
        // Sending fails if there are no watchers.
        drop(self.events.send(event));
    }
}

/// Returns whether the path leads elsewhere and no process is in the netns. Scans the node's processes in the worst
/// case.
pub(crate) fn is_gone(claim: &Claim) -> bool {
    if claim.netns.path_intact() {
        return false;
    }
    claim.ends_unnoticed.store(true, Ordering::Relaxed);
    !inspect::has_processes(&claim.netns)
}

/// Returns the error of a request that names another netns than the one of the sandbox's claim.
fn held_error(held: NetnsId, found: NetnsId) -> Failed {
    let cause =
        anyhow!("the sandbox holds {held}, which is still in use, and the request names {found}");
    Failed::new(Reason::NetnsMismatch, cause).at_field("netns")
}

pub(crate) fn unknown(sandbox: &SandboxRef) -> Failed {
    let cause = anyhow!("no netns is claimed for sandbox {sandbox}");
    Failed::new(Reason::ClaimUnknown, cause).at_field("sandbox")
}
