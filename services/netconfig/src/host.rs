//! Lets the node's probes through: what the kubelet sends to a pod's address gets, on the node, a source address that
//! the pod's own rules do not capture. It would reach ztunnel otherwise, which may demand an identity of it.
//!
//! The addresses of all pods stand in a set of the node's packet filter, each element with the name of the sandbox that
//! it is for. The kernel's elements are the memory: a restart reads them, and empties nothing. What writes here is the
//! only part of netconfig that changes the netns that it runs in.

mod cgroup;
mod eni;
mod error;
mod events;
pub(crate) mod follow;
mod guard;
mod ipset;
mod iptables;
mod kubelet;
mod nft;
mod owners;
mod preflight;
pub(crate) mod programs;
mod rules;
mod selector;
mod settings;
mod state;
mod way;

pub use error::{HostError, NotCleared, RunError, Unnamed};
pub use guard::Guard;
pub use iptables::Runner;
pub(crate) use preflight::preflight;
pub use selector::Unselected;
pub use settings::{
    AwsBranchEni, CgroupPath, NoProbeMatch, ProbeMatch, Settings, SourceV4, SourceV6,
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
use eni::Eni;
use guard::{Budget, Orphans, Spent};
use state::State;
use way::{Pace, Way};

/// Whether the set and the rule are as they should be.
const SET_CONDITION: &str = "probe-set";

/// Whether it is known whose packets are probes.
const MATCH_CONDITION: &str = "probe-match";

/// What the set and the rule are written with.
#[derive(Debug)]
pub enum By {
    /// nf_tables, over netlink.
    Nftables,
    /// ipset over netlink, and a rule by programs of iptables.
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
pub struct Host {
    /// `None` where nothing is to be done about probes.
    state: Option<Mutex<State>>,
    budget: Mutex<Budget>,
    orphans: Mutex<Orphans>,
    readiness: Readiness,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    elements: AtomicU64,
    restores: Counter,
    kubelets_user: AtomicI64,
}

/// Why the set may not be as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Because {
    /// An earlier run wrote it otherwise, or other packets are probes now.
    OfUs,
    /// Somebody changed it.
    OfOthers,
}

/// What naming a sandbox's addresses came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Whether anything had to be written.
    pub changed: bool,
    /// What the sandbox had named before.
    before: BTreeSet<IpAddr>,
}

/// Opens what the set is written through, in the calling thread's netns. `None` where nothing is to be done about probes.
fn open(settings: Settings, by: By) -> io::Result<Option<State>> {
    if settings.probe_match == ProbeMatch::Off {
        return Ok(None);
    }
    let way: Box<dyn Way> = match by {
        By::Nftables => Box::new(nft::Nft::open()?),
        By::Iptables { variant, runner } => Box::new(iptables::Iptables::open(variant, runner)?),
    };
    let eni = Eni::open(settings.aws_branch_eni)?;
    Ok(Some(State::new(way, settings, eni)))
}

impl Host {
    /// Reads what is there and puts it right. Where nothing is there nothing is written before a pod is named.
    ///
    /// # Errors
    ///
    /// When a socket cannot be had. What else is wrong is told by the conditions `probe-set` and `probe-match`, and
    /// tried again.
    pub fn start(settings: Settings, by: By, readiness: Readiness) -> io::Result<Self> {
        let state = open(settings, by)?.map(Mutex::new);
        let host = Self {
            state,
            budget: Mutex::default(),
            orphans: Mutex::default(),
            readiness,
            counts: Counts {
                kubelets_user: AtomicI64::new(-1),
                ..Counts::default()
            },
        };
        host.reselect();
        host.check(Instant::now(), Because::OfUs);
        Ok(host)
    }

    /// Watches over the set in a thread of its own, which belongs to the calling thread's netns.
    ///
    /// # Errors
    ///
    /// When no thread can be had.
    pub fn guard(self: &Arc<Self>) -> io::Result<Guard> {
        guard::start(Arc::clone(self))
    }

    /// Makes the addresses at which a sandbox is probed exactly these. Where that fails everything is as before.
    ///
    /// # Errors
    ///
    /// When the kernel or a program refuses, or it is not known whose packets are probes.
    pub fn name(
        &self,
        sandbox: &SandboxRef,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Named, Unnamed> {
        let Some(mut state) = self.lock() else {
            return Ok(Named::default());
        };
        let name = name_of(sandbox);
        let before = state.owners.addresses_of(&name);
        let result = state.set(&name, addresses);
        let result = result.map_err(|cause| {
            let undone = state.set(&name, &before);
            let undo_failures = undone.err().map(|error| with_causes(&error));
            Unnamed {
                cause,
                undo_failures: undo_failures.into_iter().collect(),
            }
        });
        self.count(&state);
        drop(state);
        Ok(Named {
            changed: result?,
            before,
        })
    }

    /// Undoes what was named. What could not be undone, a sentence each.
    pub fn take_back(&self, sandbox: &SandboxRef, named: &Named) -> Vec<String> {
        let result = self.name(sandbox, &named.before);
        let failure = result.err().map(|error| error.to_string());
        failure.into_iter().collect()
    }

    /// Takes everything that a sandbox named out of the set.
    ///
    /// # Errors
    ///
    /// As of [`Self::name`].
    pub fn release(&self, sandbox: &SandboxRef) -> Result<(), HostError> {
        self.release_unless(sandbox, || false)
    }

    /// The same, unless something holds that can only cease to hold before the next [`Self::name`].
    pub(crate) fn release_unless(
        &self,
        sandbox: &SandboxRef,
        holds: impl FnOnce() -> bool,
    ) -> Result<(), HostError> {
        let Some(mut state) = self.lock() else {
            return Ok(());
        };
        if holds() {
            return Ok(());
        }
        self.forget(&mut state, &name_of(sandbox))
    }

    /// Takes all of it off the node, unless an address is in it. Whether anything was there.
    ///
    /// # Errors
    ///
    /// When an address is in it, or the kernel or a program refuses.
    pub fn clear(&self) -> Result<bool, NotCleared> {
        let Some(mut state) = self.lock() else {
            return Ok(false);
        };
        let held = state.owners.count();
        if held > 0 {
            return Err(NotCleared::Held(held));
        }
        let cleared = state.clear();
        self.count(&state);
        drop(state);
        let cleared = cleared?;
        if cleared {
            tracing::info!("Took the probe set off the node");
        }
        Ok(cleared)
    }

    /// Takes out what no claim has been held for, for so long that none will be.
    pub(crate) fn forget_unclaimed(&self, claimed: &BTreeSet<String>) {
        let Some(mut state) = self.lock() else {
            return;
        };
        let names = state.owners.names();
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        for name in orphans.due(names, claimed, Instant::now()) {
            match self.forget(&mut state, &name) {
                Ok(()) => {
                    tracing::info!(
                        sandbox = name,
                        "Took what nobody claims out of the probe set"
                    );
                }
                Err(error) => {
                    let error = with_causes(&error);
                    tracing::warn!(sandbox = name, error, "Cannot clear the probe set");
                }
            }
        }
    }

    /// One that fails is still wanted, so that it is tried again.
    fn forget(&self, state: &mut State, name: &str) -> Result<(), HostError> {
        let before = state.owners.addresses_of(name);
        let result = state.set(name, &BTreeSet::new());
        if result.is_err() {
            state.owners.set(name, &before);
        }
        self.count(state);
        result.map(drop)
    }

    /// Reads all of it, and puts right what is not as it should be. Whether it is by then.
    fn check(&self, now: Instant, because: Because) -> bool {
        let Some(mut state) = self.lock() else {
            return true;
        };
        let checked = self.checked(&mut state, now, because);
        self.count(&state);
        drop(state);
        let is_right = checked.is_ok();
        self.readiness.set(SET_CONDITION, checked);
        is_right
    }

    fn checked(&self, state: &mut State, now: Instant, because: Because) -> Result<(), String> {
        let told = |error: HostError| with_causes(&error);
        let differences = match state.read().map_err(told)? {
            Some(differences) => differences,
            None if state.in_use => vec!["all of it is gone".to_owned()],
            None => return Ok(()),
        };
        if differences.is_empty() {
            return Ok(());
        }
        let differences = differences.join("; ");
        let spent = self
            .budget
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .spend(now);
        if spent != Spent::Yes {
            if spent == Spent::NoMore {
                tracing::error!(differences, "Something keeps changing the node's probe set");
            }
            return Err(format!("something keeps changing it: {differences}"));
        }
        state.write().map_err(told)?;
        match because {
            Because::OfUs => tracing::info!(differences, "Rewrote the node's probe set"),
            Because::OfOthers => {
                self.counts.restores.inc();
                tracing::warn!(differences, "Put the node's probe set right");
            }
        }
        Ok(())
    }

    /// Looks again whose packets are probes. Whether that is another than was known.
    fn reselect(&self) -> bool {
        let Some(mut state) = self.lock() else {
            return false;
        };
        let selected = state.reselect();
        let user = state.selector.kubelets_user();
        drop(state);
        self.counts
            .kubelets_user
            .store(user.map_or(-1, i64::from), Ordering::Relaxed);
        let Some(selected) = selected else {
            return false;
        };
        let told = selected.as_ref().map(drop).map_err(ToString::to_string);
        self.readiness.set(MATCH_CONDITION, told);
        selected.unwrap_or(false)
    }

    fn is_suspicious(&self) -> bool {
        self.lock().is_some_and(|mut state| state.is_suspicious())
    }

    fn hears(&self, family: u8, table: &str, port: u32) -> bool {
        self.lock()
            .is_some_and(|state| state.in_use && state.way.hears(family, table, port))
    }

    fn pace(&self, took: Duration) -> Pace {
        const IDLE: Pace = Pace {
            glance: Duration::from_secs(60),
            read: Duration::from_secs(60),
        };
        self.lock().map_or(IDLE, |state| state.pace(took))
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

    /// The user that the kubelet runs as, where probes are told by that and it was found.
    pub fn kubelets_user(&self) -> Option<u32> {
        u32::try_from(self.counts.kubelets_user.load(Ordering::Relaxed)).ok()
    }

    fn count(&self, state: &State) {
        let elements = u64::try_from(state.owners.count()).unwrap_or(u64::MAX);
        self.counts.elements.store(elements, Ordering::Relaxed);
    }

    /// A panic while it was held cannot have left it in a way that the next read does not mend.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.state.as_ref()?;
        Some(state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
