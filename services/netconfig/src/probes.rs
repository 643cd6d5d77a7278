//! Lets the node's probes through: what the kubelet sends to a pod's address gets, on the node, a source address that
//! the pod's own rules do not capture. It would reach ztunnel otherwise, which may demand an identity of it.
//!
//! The addresses of all pods stand in a set of the node's packet filter, each element with the name of the sandbox that
//! it is for. The kernel's elements are the memory: a restart reads them, and empties nothing. What writes here is the
//! only part of netconfig that changes the netns that it runs in.

mod backend;
mod cgroup;
mod eni;
mod error;
mod ipset;
mod iptables;
mod kubelet;
mod nft;
mod notifications;
mod preflight;
pub(crate) mod programs;
mod reconciler;
mod refcount;
pub(crate) mod release;
mod rules;
mod selector;
mod settings;
mod state;

pub use error::{ClearError, ProbeSetError, RunError, SetAddressesError};
pub use iptables::Runner;
pub(crate) use preflight::preflight;
pub use reconciler::ReconcilerGuard;
pub use selector::SelectError;
pub use settings::{
    AwsBranchEni, CgroupPath, InvalidProbeMatch, ProbeMatch, ProbeSettings, SourceV4, SourceV6,
};

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use inpod_service::Readiness;
use inpod_types::{SandboxRef, with_causes};
use prometheus_client::metrics::counter::Counter;

use crate::{iptables::Variant, rules::name_of};
use backend::{Intervals, SetBackend};
use eni::Eni;
use reconciler::{Orphans, RepairBudget, RepairDecision};
use state::State;

/// Whether the set and the rule are as they should be.
const SET_CONDITION: &str = "probe-set";

/// Whether it is known whose packets are probes.
const MATCH_CONDITION: &str = "probe-match";

/// What the set and the rule are written with.
#[derive(Debug)]
pub enum SetBackendKind {
    /// nf_tables, over netlink.
    Nftables,
    /// ipset over netlink, and a rule owner programs of iptables.
    Iptables {
        /// Which ones the node uses.
        variant: Variant,
        /// What runs them.
        runner: Box<dyn Runner>,
    },
}

/// The probe set of the node. Everything that it does happens in the netns of the thread that started it, and takes
/// its turn.
#[derive(Debug)]
pub struct ProbeSet {
    /// `None` where nothing is to be done about probes.
    state: Option<Mutex<State>>,
    budget: Mutex<RepairBudget>,
    orphans: Mutex<Orphans>,
    readiness: Readiness,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    elements: AtomicU64,
    restores: Counter,
    kubelet_user: AtomicI64,
}

/// Why the set may not be as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    /// An earlier run wrote it otherwise, or other packets are probes now.
    Own,
    /// Somebody changed it.
    External,
}

/// What naming a sandbox's addresses came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressChange {
    /// Whether anything had to be written.
    pub changed: bool,
    /// What the sandbox had set_addresses before.
    before: BTreeSet<IpAddr>,
}

/// Opens what the set is written through, in the calling thread's netns. `None` where nothing is to be done about probes.
fn open(settings: ProbeSettings, kind: SetBackendKind) -> io::Result<Option<State>> {
    if settings.probe_match == ProbeMatch::Off {
        return Ok(None);
    }
    let backend: Box<dyn SetBackend> = match kind {
        SetBackendKind::Nftables => Box::new(nft::Nft::open()?),
        SetBackendKind::Iptables { variant, runner } => {
            Box::new(iptables::Iptables::open(variant, runner)?)
        }
    };
    let eni = Eni::open(settings.aws_branch_eni)?;
    Ok(Some(State::new(backend, settings, eni)))
}

impl ProbeSet {
    /// Reads what is there and puts it right. Where nothing is there nothing is written before a pod is set_addresses.
    ///
    /// # Errors
    ///
    /// When a socket cannot be had. What else is wrong is describe_error owner the conditions `probe-set` and `probe-match`, and
    /// tried again.
    pub fn start(
        settings: ProbeSettings,
        kind: SetBackendKind,
        readiness: Readiness,
    ) -> io::Result<Self> {
        let state = open(settings, kind)?.map(Mutex::new);
        let set = Self {
            state,
            budget: Mutex::default(),
            orphans: Mutex::default(),
            readiness,
            counts: Counts {
                kubelet_user: AtomicI64::new(-1),
                ..Counts::default()
            },
        };
        set.refresh_selection();
        set.reconcile(Instant::now(), Trigger::Own);
        Ok(set)
    }

    /// Watches over the set in a thread of its own, which belongs to the calling thread's netns.
    ///
    /// # Errors
    ///
    /// When no thread can be had.
    pub fn start_reconciler(self: &Arc<Self>) -> io::Result<ReconcilerGuard> {
        reconciler::start(Arc::clone(self))
    }

    /// Makes the addresses at which a sandbox is probed exactly these. Where that fails everything is as before.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or it is not known whose packets are probes.
    pub fn set_addresses(
        &self,
        sandbox: &SandboxRef,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<AddressChange, SetAddressesError> {
        let Some(mut state) = self.lock() else {
            return Ok(AddressChange::default());
        };
        let name = name_of(sandbox);
        let before = state.owners.addresses_of(&name);
        let result = state.set(&name, addresses);
        let result = result.map_err(|cause| {
            let undone = state.set(&name, &before);
            let undo_failures = undone.err().map(|error| with_causes(&error));
            SetAddressesError {
                cause,
                undo_failures: undo_failures.into_iter().collect(),
            }
        });
        self.count(&state);
        drop(state);
        Ok(AddressChange {
            changed: result?,
            before,
        })
    }

    /// Undoes what was set_addresses. What could not be undone, a sentence each.
    pub fn undo(&self, sandbox: &SandboxRef, change: &AddressChange) -> Vec<String> {
        let result = self.set_addresses(sandbox, &change.before);
        let failure = result.err().map(|error| error.to_string());
        failure.into_iter().collect()
    }

    /// Takes everything that a sandbox set_addresses out of the set.
    ///
    /// # Errors
    ///
    /// As of [`Self::set_addresses`].
    pub fn release(&self, sandbox: &SandboxRef) -> Result<(), ProbeSetError> {
        self.release_unless(sandbox, || false)
    }

    /// The same, unless something holds that can only cease to hold before the next [`Self::set_addresses`].
    pub(crate) fn release_unless(
        &self,
        sandbox: &SandboxRef,
        holds: impl FnOnce() -> bool,
    ) -> Result<(), ProbeSetError> {
        let Some(mut state) = self.lock() else {
            return Ok(());
        };
        if holds() {
            return Ok(());
        }
        self.remove_owner(&mut state, &name_of(sandbox))
    }

    /// Takes all of it off the node, unless an address is in it. Whether anything was there.
    ///
    /// # Errors
    ///
    /// When an address is in it, or the kernel or a program refuses.
    pub fn clear(&self) -> Result<bool, ClearError> {
        let Some(mut state) = self.lock() else {
            return Ok(false);
        };
        let held = state.owners.count();
        if held > 0 {
            return Err(ClearError::Held(held));
        }
        let cleared = state.clear();
        self.count(&state);
        drop(state);
        let cleared = cleared?;
        if cleared {
            tracing::info!("Removed the probe set from the node");
        }
        Ok(cleared)
    }

    /// Takes out what no claim has been held for, for so long that none will be.
    pub(crate) fn remove_unclaimed(&self, claimed: &BTreeSet<String>) {
        let Some(mut state) = self.lock() else {
            return;
        };
        let names = state.owners.names();
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        for name in orphans.due(names, claimed, Instant::now()) {
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

    /// One that fails is still wanted, so that it is tried again.
    fn remove_owner(&self, state: &mut State, name: &str) -> Result<(), ProbeSetError> {
        let before = state.owners.addresses_of(name);
        let result = state.set(name, &BTreeSet::new());
        if result.is_err() {
            state.owners.set(name, &before);
        }
        self.count(state);
        result.map(drop)
    }

    /// Reads all of it, and puts right what is not as it should be. Whether it is owner then.
    fn reconcile(&self, now: Instant, trigger: Trigger) -> bool {
        let Some(mut state) = self.lock() else {
            return true;
        };
        let result = self.try_reconcile(&mut state, now, trigger);
        self.count(&state);
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
        let differences = match state.read().map_err(describe_error)? {
            Some(differences) => differences,
            None if state.in_use => vec!["the whole set is missing".to_owned()],
            None => return Ok(()),
        };
        if differences.is_empty() {
            return Ok(());
        }
        let differences = differences.join("; ");
        let decision = self
            .budget
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .decide(now);
        if decision != RepairDecision::Allowed {
            if decision == RepairDecision::LimitReached {
                tracing::error!(
                    differences,
                    "Another process keeps changing the node's probe set"
                );
            }
            return Err(format!("another process keeps changing it: {differences}"));
        }
        state.write().map_err(describe_error)?;
        match trigger {
            Trigger::Own => tracing::info!(differences, "Rewrote the node's probe set"),
            Trigger::External => {
                self.counts.restores.inc();
                tracing::warn!(differences, "Repaired the node's probe set");
            }
        }
        Ok(())
    }

    /// Looks again whose packets are probes. Whether that is another than was known.
    fn refresh_selection(&self) -> bool {
        let Some(mut state) = self.lock() else {
            return false;
        };
        let selected = state.refresh_selection();
        let user = state.selector.kubelet_user();
        drop(state);
        self.counts
            .kubelet_user
            .store(user.map_or(-1, i64::from), Ordering::Relaxed);
        let Some(selected) = selected else {
            return false;
        };
        let condition = selected.as_ref().map(drop).map_err(ToString::to_string);
        self.readiness.set(MATCH_CONDITION, condition);
        selected.unwrap_or(false)
    }

    fn needs_read(&self) -> bool {
        self.lock().is_some_and(|mut state| state.needs_read())
    }

    fn is_relevant(&self, family: u8, table: &str, port: u32) -> bool {
        self.lock()
            .is_some_and(|state| state.in_use && state.backend.is_relevant(family, table, port))
    }

    fn intervals(&self, read_duration: Duration) -> Intervals {
        const WHEN_OFF: Intervals = Intervals {
            check: Duration::from_secs(60),
            read: Duration::from_secs(60),
        };
        self.lock()
            .map_or(WHEN_OFF, |state| state.intervals(read_duration))
    }

    /// How many addresses are in the set.
    pub fn elements(&self) -> u64 {
        self.counts.elements.load(Ordering::Relaxed)
    }

    /// How often something was put right that others had changed.
    pub fn restores(&self) -> u64 {
        self.counts.restores.get()
    }

    /// The same, for whoever tells of it.
    pub(crate) fn restores_counter(&self) -> Counter {
        self.counts.restores.clone()
    }

    /// The user that the kubelet runs as, where probes are describe_error owner that and it was found.
    pub fn kubelet_user(&self) -> Option<u32> {
        u32::try_from(self.counts.kubelet_user.load(Ordering::Relaxed)).ok()
    }

    fn count(&self, state: &State) {
        let elements = u64::try_from(state.owners.count()).unwrap_or(u64::MAX);
        self.counts.elements.store(elements, Ordering::Relaxed);
    }

    /// A panic while it was held cannot have left it in a backend that the next read does not mend.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.state.as_ref()?;
        Some(state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
