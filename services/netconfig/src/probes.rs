//! Exempts kubelet probes from capture: on the node, packets of the kubelet to a pod get a source address that the
//! pod's rules do not capture. Otherwise a probe would reach ztunnel, which may demand an identity.
//!
//! A set in the node's packet filter holds the addresses of all pods, with sandbox names as comments. The kernel's
//! elements are the only state: a restart reads the elements and removes none. Pods with a branch ENI also need ip
//! rules (`eni`). The set and the ip rules are netconfig's only changes to its own netns, and share owners, reads,
//! repairs and release.

mod eni;
mod nft;
mod preflight;
mod reconciler;
mod refcount;
pub(crate) mod release;
mod rules;
mod settings;
mod state;

pub use crate::error::ProbeSetError;
pub(crate) use preflight::preflight;
pub use reconciler::ReconcilerGuard;
pub use settings::{
    AwsBranchEni, InvalidProbeMatch, ProbeMatch, ProbeSettings, SourceV4, SourceV6,
};

use std::{
    collections::BTreeSet,
    io, mem,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::anyhow;
use inpod_service::Readiness;
use inpod_types::{Reason, SandboxRef, with_causes};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tokio::sync::watch;

use crate::{
    error::Failed,
    rules::{Expr, sandbox_name},
};
use eni::Eni;
use nft::Nft;
use reconciler::{Orphans, RepairBudget};
use state::State;

/// The name of the readiness condition that the node's tables and ip rules are in sync.
const SET_CONDITION: &str = "probe-set";

/// The time between two complete reads, which notice any change.
pub(crate) const READ_INTERVAL: Duration = Duration::from_secs(60);

/// The node's probe set, in the netns of the thread that calls [`ProbeSet::start`]. Calls run one at a time.
#[derive(Debug)]
pub struct ProbeSet {
    /// `None` if probes are not exempted.
    state: Option<Mutex<State>>,
    budget: Mutex<RepairBudget>,
    orphans: Mutex<Orphans>,
    readiness: Readiness,
    elements: Gauge,
    restores: Counter,
    repair: watch::Sender<Option<Repair>>,
}

/// A repair of what another program had changed in the node's netns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repair {
    pub(crate) at: SystemTime,
    /// One sentence per difference.
    pub(crate) differences: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    /// The start of netconfig, at which differences come from an earlier process.
    Own,
    /// A later check, at which differences come from another program.
    External,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressChange {
    pub changed: bool,
    /// The sandbox's addresses before the change.
    before: BTreeSet<IpAddr>,
}

/// Opens sockets in the calling thread's netns. Returns `None` if probes are not exempted.
fn open(settings: &ProbeSettings) -> io::Result<Option<State>> {
    let Some(sender) = settings.probe_match.sender() else {
        return Ok(None);
    };
    let nft = Nft::open(&sender, settings)?;
    let eni = Eni::open(settings.aws_branch_eni)?;
    Ok(Some(State::new(nft, eni)))
}

/// Removes the tables of an earlier process that exempted probes. The tables would still change the source of probes to
/// an address that pods' rules no longer exempt.
fn remove_earlier(mut nft: Nft) -> Result<(), String> {
    let cleared = nft.clear().map_err(|error| with_causes(&error))?;
    if cleared {
        tracing::info!("Removed the probe set of an earlier run from the node");
    }
    Ok(())
}

impl ProbeSet {
    /// Reads and repairs the probe set. A missing set is not written until a pod has addresses.
    ///
    /// # Errors
    ///
    /// The call fails if a socket cannot be opened. Other problems show as the condition `probe-set`, and are retried;
    /// the removal of an earlier process's tables is retried at the next start.
    pub fn start(settings: &ProbeSettings, readiness: Readiness) -> io::Result<Self> {
        let state = open(settings)?;
        if state.is_none() {
            // The tables are deleted by name, so the sender in the rules does not matter.
            let nft = Nft::open(&Expr::FromAnySocket, settings)?;
            readiness.set(SET_CONDITION, remove_earlier(nft));
        }
        let set = Self {
            state: state.map(Mutex::new),
            budget: Mutex::default(),
            orphans: Mutex::default(),
            readiness,
            elements: Gauge::default(),
            restores: Counter::default(),
            repair: watch::Sender::new(None),
        };
        set.reconcile(Instant::now(), Trigger::Own);
        Ok(set)
    }

    pub fn start_reconciler(
        self: &Arc<Self>,
        read_interval: Duration,
    ) -> io::Result<ReconcilerGuard> {
        reconciler::start(Arc::clone(self), read_interval)
    }

    /// Sets a sandbox's addresses, and restores the previous addresses on failure.
    ///
    /// # Errors
    ///
    /// The call fails if the kernel refuses a request.
    pub fn set_addresses(
        &self,
        sandbox: &SandboxRef,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<AddressChange, Failed> {
        let Some(mut state) = self.lock() else {
            return Ok(AddressChange::default());
        };
        let name = sandbox_name(sandbox);
        let before = state.owners.addresses_of(&name);
        let result = state.set(&name, addresses);
        let result = result.map_err(|cause| {
            let undone = state.set(&name, &before);
            let undo_failures = undone.err().map(|error| with_causes(&error));
            Failed::from(cause).with_undo_failures(undo_failures.into_iter().collect())
        });
        self.publish(&mut state);
        drop(state);
        Ok(AddressChange {
            changed: result?,
            before,
        })
    }

    /// Restores the addresses of before a change. Returns one sentence per step that could not be undone.
    pub fn undo(&self, sandbox: &SandboxRef, change: &AddressChange) -> Vec<String> {
        let result = self.set_addresses(sandbox, &change.before);
        let failure = result.err().map(|error| error.to_string());
        failure.into_iter().collect()
    }

    /// Removes a sandbox's addresses from the set.
    pub fn release(&self, sandbox: &SandboxRef) -> Result<(), ProbeSetError> {
        self.release_unless(sandbox, || false)
    }

    /// Removes a sandbox's addresses unless the sandbox is claimed. `is_claimed` is called under the lock, so a claim
    /// made meanwhile sets its addresses after the removal.
    pub(crate) fn release_unless(
        &self,
        sandbox: &SandboxRef,
        is_claimed: impl FnOnce() -> bool,
    ) -> Result<(), ProbeSetError> {
        let Some(mut state) = self.lock() else {
            return Ok(());
        };
        if is_claimed() {
            return Ok(());
        }
        self.remove_owner(&mut state, &sandbox_name(sandbox))
    }

    /// Removes the tables of an empty probe set. Returns whether there was a table.
    pub fn clear(&self) -> Result<bool, Failed> {
        let Some(mut state) = self.lock() else {
            return Ok(false);
        };
        let held = state.owners.count();
        if held > 0 {
            let cause = anyhow!("{held} addresses of pods are in the node's probe set");
            return Err(Failed::new(Reason::NetnsInUse, cause));
        }
        let cleared = state.clear();
        self.publish(&mut state);
        drop(state);
        let cleared = cleared?;
        if cleared {
            tracing::info!("Removed the probe set from the node");
        }
        Ok(cleared)
    }

    /// Removes the addresses of sandboxes that have been unclaimed for the grace period.
    pub(crate) fn remove_unclaimed(&self, claimed: &BTreeSet<String>) {
        let Some(mut state) = self.lock() else {
            return;
        };
        let names = state.owners.names();
        for name in self.orphans.lock().due(names, claimed, Instant::now()) {
            match self.remove_owner(&mut state, &name) {
                Ok(()) => {
                    tracing::info!(
                        sandbox = name,
                        "Removed unclaimed addresses from the probe set"
                    );
                }
                Err(error) => {
                    let error = with_causes(&error);
                    tracing::warn!(
                        sandbox = name,
                        error,
                        "Cannot remove unclaimed addresses from the probe set"
                    );
                }
            }
        }
    }

    /// Removes an owner's addresses. After a failure the addresses stay recorded, and a later call tries again.
    fn remove_owner(&self, state: &mut State, name: &str) -> Result<(), ProbeSetError> {
        let before = state.owners.addresses_of(name);
        let result = state.set(name, &BTreeSet::new());
        if result.is_err() {
            state.owners.set(name, &before);
        }
        self.publish(state);
        result.map(drop)
    }

    /// Reads the probe set and the ip rules, and repairs differences. Returns whether everything is in sync afterwards.
    fn reconcile(&self, now: Instant, trigger: Trigger) -> bool {
        let Some(mut state) = self.lock() else {
            return true;
        };
        let result = self.try_reconcile(&mut state, now, trigger);
        self.publish(&mut state);
        drop(state);
        let is_in_sync = result.is_ok();
        self.readiness.set(SET_CONDITION, result);
        is_in_sync
    }

    fn try_reconcile(
        &self,
        state: &mut State,
        now: Instant,
        trigger: Trigger,
    ) -> Result<(), String> {
        let describe_error = |error: ProbeSetError| with_causes(&error);
        let found = state.read().map_err(describe_error)?;
        if !found.is_empty() {
            let differences = found.sentences().join("; ");
            if !self.budget.lock().allows(now) {
                return Err(format!("another process keeps changing it: {differences}"));
            }
            tracing::info!(
                differences,
                "Rewriting what inpod keeps in the node's netns"
            );
        }
        let is_upgrade = trigger == Trigger::Own;
        state.mend(found, is_upgrade).map_err(describe_error)
    }

    /// Returns a receiver of the latest repair.
    pub(crate) fn repairs(&self) -> watch::Receiver<Option<Repair>> {
        self.repair.subscribe()
    }

    /// Returns whether the node has changed since the last read. An unreadable state counts as changed, because the
    /// reconciliation then reports the error.
    fn has_changed(&self) -> bool {
        let state = self.lock();
        state.is_some_and(|mut state| state.has_changed().unwrap_or(true))
    }

    /// Returns the gauge of addresses in the set.
    pub fn elements(&self) -> &Gauge {
        &self.elements
    }

    /// Returns the counter of repairs after changes by other programs.
    pub fn restores(&self) -> &Counter {
        &self.restores
    }

    /// Publishes the number of addresses, and repairs of changes by other programs.
    fn publish(&self, state: &mut State) {
        let elements = i64::try_from(state.owners.count()).unwrap_or(i64::MAX);
        self.elements.set(elements);
        let lost = mem::take(&mut state.lost);
        if lost.is_empty() {
            return;
        }
        tracing::warn!(
            differences = lost.join("; "),
            "Repaired what another program had changed in the node's netns"
        );
        self.restores.inc();
        let at = SystemTime::now();
        let differences = lost;
        self.repair.send_replace(Some(Repair { at, differences }));
    }

    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.as_ref().map(Mutex::lock)
    }
}
